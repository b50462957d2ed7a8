"""Converts SentencePiece `.model` files to a `tokenizer.json`.

The file is one protocol buffer, `ModelProto` of `sentencepiece_model.proto`. The few fields needed
are read directly from the wire format, so neither `sentencepiece` nor `protobuf` must be installed.

There are two differences from the SentencePiece library (1808.06226). An unknown token decodes to
its name here. If two merges of a BPE make the same piece, the SentencePiece library applies the
leftmost one; here, the one whose left part has the smaller id is applied.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.config import BYTE_TOKENS, SPACE

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Enum values of model types and of piece types in `sentencepiece_model.proto`."""
PIECES, TRAINER, NORMALIZER = 1, 2, 3
"""Field numbers of `ModelProto`."""
TEXT, SCORE, KIND = 1, 2, 3
"""Field numbers of `SentencePiece`, the message of a piece."""
MAX_PIECE = 200
"""Maximum number of characters in a piece. SentencePiece's default is 16; Gemma has up to 32."""
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Field types of the wire format."""


def convert(data: bytes) -> tuple[str, dict[str, str]]:
    """Convert a SentencePiece model to a `tokenizer.json`.

    Args:
        data: content of a `.model` file of type BPE or Unigram.

    Returns:
        The content of the `tokenizer.json`, and the bos, eos, pad and unk tokens by role.

    Raises:
        WorkhorseError: `data` is not a SentencePiece model, or has an unsupported type or option.
    """
    proto = _checked_model(data)
    pieces: list[tuple[str, float, int]] = proto["pieces"]
    kinds = {kind for _, _, kind in pieces}
    if proto["model_type"] not in (UNIGRAM, BPE) or UNUSED in kinds or proto["suffix_space"]:
        raise WorkhorseError(
            "the SentencePiece model is not supported: it has the type word or char, unused "
            "pieces, or spaces as suffixes; use a BPE or Unigram model"
        )
    roles = {
        role: pieces[number][0]
        for role, number in proto["roles"].items()
        if 0 <= number < len(pieces)
    }
    return _definition(proto), roles


def convert_pieces(
    pieces: list[tuple[str, float, int]], model_type: int, *, dummy_prefix: bool
) -> str:
    """Return the content of a `tokenizer.json` for pieces from another file, such as GGUF.

    Args:
        pieces: string, score and type of each piece, in the order of their ids.
        model_type: `UNIGRAM` or `BPE`.
        dummy_prefix: True to begin every input with a space.

    Raises:
        ValueError: a piece is too long to search for merges.
    """
    if any(len(text) > MAX_PIECE for text, _, _ in pieces):
        raise ValueError(f"a token has more than {MAX_PIECE} characters")
    plain = {"charsmap": b"", "remove_extra_spaces": False, "dummy_prefix": dummy_prefix}
    return _definition({"pieces": pieces, "model_type": model_type, **plain})


def _definition(proto: dict[str, Any]) -> str:
    pieces: list[tuple[str, float, int]] = proto["pieces"]
    backend = Tokenizer(_bpe(proto) if proto["model_type"] == BPE else _unigram(proto))
    backend.normalizer = _normalizer(proto)
    backend.pre_tokenizer = _pre_tokenizer(pieces)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = _decoder(proto["dummy_prefix"])
    for text, _, kind in pieces:
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(text, special=False, normalized=False)])
    return backend.to_str()


def _checked_model(data: bytes) -> dict[str, Any]:
    try:
        proto = _read_model(data)
    except (IndexError, struct.error, ValueError, TypeError):
        proto = {}
    if not proto.get("pieces"):
        raise WorkhorseError(
            "it is not a SentencePiece model, or it is damaged; use a file that spm_train wrote"
        )
    return proto


@dataclass(frozen=True)
class Vocabulary:
    """The pieces and merges of a BPE model, without scores, for a tokenizer class."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    controls: tuple[AddedToken, ...]
    """The control pieces and user-defined pieces."""


def bpe_vocabulary(data: bytes) -> Vocabulary | None:
    """Return the pieces and merges of a BPE model, ordered by id; None for other model types.

    Raises:
        WorkhorseError: `data` is not a SentencePiece model.
    """
    proto = _checked_model(data)
    if proto["model_type"] != BPE:
        return None
    pieces: list[tuple[str, float, int]] = proto["pieces"]
    vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
    merges = [
        (number, cut, text)
        for text, number in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    controls = tuple(
        AddedToken(text, normalized=False, special=kind == CONTROL)
        for text, _, kind in pieces
        if kind in (CONTROL, USER_DEFINED)
    )
    return Vocabulary(
        vocab, [(text[:cut], text[cut:]) for _, cut, text in sorted(merges)], controls
    )


def _bpe(proto: dict[str, Any]) -> models.BPE:
    pieces: list[tuple[str, float, int]] = proto["pieces"]
    vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
    mergeable = {text for text, _, kind in pieces if kind == NORMAL}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in pieces:
        if kind != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-score, vocab[left], vocab[right], left, right))
    unknown = next((text for text, _, kind in pieces if kind == UNKNOWN), None)
    return models.BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_has_bytes(proto),
    )


def _unigram(proto: dict[str, Any]) -> models.Unigram:
    pieces: list[tuple[str, float, int]] = proto["pieces"]
    unknown = next((i for i, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN), None)
    vocab = [(text, score) for text, score, _ in pieces]
    return models.Unigram(vocab, unk_id=unknown, byte_fallback=_has_bytes(proto))


def _has_bytes(proto: dict[str, Any]) -> bool:
    return {text for text, _, kind in proto["pieces"] if kind == BYTE}.issuperset(BYTE_TOKENS)


def _normalizer(proto: dict[str, Any]) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if proto["charsmap"]:
        steps.append(normalizers.Precompiled(proto["charsmap"]))
    if proto["remove_extra_spaces"]:
        steps += [
            normalizers.Replace(Regex("^ +| +$"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if proto["dummy_prefix"]:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(pieces: list[tuple[str, float, int]]) -> pre_tokenizers.PreTokenizer | None:
    """Return a pre-tokenizer that splits before spaces; None if a piece contains an inner space.

    Splitting makes encoding much faster. It does not change the ids if no piece has an inner space.
    """
    if any(SPACE in text[1:] for text, _, kind in pieces if kind == NORMAL):
        return None
    return pre_tokenizers.Split(SPACE, behavior="merged_with_next")


def _decoder(dummy_prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps)


def _read_model(data: bytes) -> dict[str, Any]:
    """Read the fields of `ModelProto` that affect ids; absent fields have the proto's defaults."""
    proto: dict[str, Any] = {
        "pieces": [],
        "model_type": UNIGRAM,
        "suffix_space": False,
        "roles": {"unk": 0, "bos": 1, "eos": 2, "pad": -1},
        "charsmap": b"",
        "dummy_prefix": True,
        "remove_extra_spaces": True,
    }
    trainer: dict[int, Callable[[Any], None]] = {
        3: lambda value: proto.update(model_type=value),
        24: lambda value: proto.update(suffix_space=bool(value)),
        40: lambda value: proto["roles"].update(unk=_signed(value)),
        41: lambda value: proto["roles"].update(bos=_signed(value)),
        42: lambda value: proto["roles"].update(eos=_signed(value)),
        43: lambda value: proto["roles"].update(pad=_signed(value)),
    }
    normalizer: dict[int, Callable[[Any], None]] = {
        2: lambda value: proto.update(charsmap=value),
        3: lambda value: proto.update(dummy_prefix=bool(value)),
        4: lambda value: proto.update(remove_extra_spaces=bool(value)),
    }
    for field, value in _fields(data):
        if field == PIECES:
            piece = {TEXT: b"", SCORE: bytes(4), KIND: NORMAL, **dict(_fields(value))}
            (score,) = struct.unpack("<f", piece[SCORE])
            text = piece[TEXT].decode()
            if len(text) > MAX_PIECE:
                raise ValueError("a piece is too long to search for merges")
            proto["pieces"].append((text, score, piece[KIND]))
        elif field in (TRAINER, NORMALIZER):
            known = trainer if field == TRAINER else normalizer
            for number, inner in _fields(value):
                known.get(number, lambda _: None)(inner)
    return proto


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the field numbers and values of a protocol buffer: integers, or else raw bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire_type = key & 7
        if wire_type == VARINT:
            value, at = _varint(message, at)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)
            if wire_type == LENGTH:
                size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
            if at > len(message) or wire_type not in (FIXED64, LENGTH, FIXED32):
                raise ValueError("not a protocol buffer, or truncated")
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:  # noqa: PLR2004
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    raise ValueError("an integer has more than 64 bits")


def _signed(value: int) -> int:
    """Decode a protocol buffer's int32: negative values are written as 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
