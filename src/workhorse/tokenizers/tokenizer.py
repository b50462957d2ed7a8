"""The class of all tokenizers: converts strings or bytes to token ids, and back."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from workhorse.errors import WorkhorseError, shown
from workhorse.tokenizers.backend import add_tokens, checked_ids, ids_of, library_tokenizer
from workhorse.tokenizers.control import ControlEncoder, affixes, guarded, reachable, set_affixes
from workhorse.tokenizers.files import folder_texts, write_folder
from workhorse.tokenizers.growth import check_growth
from workhorse.tokenizers.pieces import BYTE_ALPHABET, StreamDecoder, read_decoding

ROLES = ("bos", "eos", "pad", "unk")
_WITHOUT_PREFIX: dict[str, dict[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never"},
    "Prepend": {"prepend": ""},
    "Strip": {"strip_left": False},
}
"""The options with which rules of a `tokenizer.json` leave the beginning of the input as it is."""


@dataclass(frozen=True)
class Piece:
    """One token of a token sequence, with its bytes."""

    id: int
    data: bytes
    """The bytes of the token. They can be a part of a character."""
    special: bool

    @property
    def text(self) -> str | None:
        """The bytes as a string; None if they are not UTF-8, such as a part of a character."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class Source:
    """The files that a tokenizer was read from."""

    files: Mapping[str, bytes]
    model_type: str | None
    """Type of the model in the same folder; it affects how transformers reads the files."""


class Tokenizer:
    """Encodes and decodes with any algorithm of the `tokenizers` library.

    It can be shared between threads and sent to other processes.

    Args:
        definition: content of a `tokenizer.json`.
        roles: names of the `bos`, `eos`, `pad` and `unk` tokens, if any, and of other tokens that
            chat templates may use.
        chat_template: jinja source of the chat template, or a mapping of several sources by name.
            `default` is used unless another name is given. None: no template.
        source: the files that the tokenizer was read from, to write them back unchanged.

    Raises:
        WorkhorseError: the definition is not a `tokenizer.json`, the token of a role is not in the
            vocabulary, or the decoder cannot decode token by token.
    """

    def __init__(
        self,
        definition: str,
        roles: Mapping[str, str | None] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        source: Source | None = None,
    ) -> None:
        self._backend = library_tokenizer(definition)
        self._backend.encode_special_tokens = True  # do not match special tokens in the input
        self._definition: dict[str, Any] = json.loads(self._backend.to_str())
        check_growth(self._definition)
        names = reachable(self._definition)
        self._backend.pre_tokenizer = guarded(self._backend.pre_tokenizer, names)  # pyright: ignore
        self._decoding = read_decoding(self._definition["decoder"])
        is_one = isinstance(chat_template, str)
        self.chat_templates: dict[str, str] = (
            {"default": chat_template} if is_one else dict(chat_template or {})
        )
        self.source = source
        self.roles = {role: name for role, name in (roles or {}).items() if name is not None}
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in self._definition["added_tokens"]
            if token["special"]
        }
        """Special tokens and their ids. They are matched in the input only with `allow_special`."""
        self.vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)
        """The largest id plus 1. Unused ids also count."""
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (self._role_id(r) for r in ROLES)
        self.prefix_ids, self.suffix_ids = affixes(self._definition["post_processor"])
        """Ids that `encode_sequence` adds before and after the input, from the post-processor."""
        self.plain_added_tokens = frozenset(
            token["content"] for token in self._definition["added_tokens"] if not token["special"]
        )
        """Added tokens that are not special. They are matched in any input."""
        self._control_encoders: dict[frozenset[str], ControlEncoder] = {}

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the default chat template; None if there is none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encode a string to token ids. No bos or eos is added.

        Args:
            text: the string; an empty string has no ids.
            allow_special: True to encode the name of a special token as that token. Never use it
                for untrusted text.

        Raises:
            WorkhorseError: `text` is not a str, it has a lone surrogate, which UTF-8 cannot encode,
                or the tokenizer fails on it.
        """
        return self.encode_batch([text], allow_special=allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, allow_special: bool = False, begins: bool = True
    ) -> list[list[int]]:
        """Encode several strings, in parallel if the machine has several cores.

        With `begins=False` they continue other strings: no space is added before them.
        """
        backend = self._matching_special if allow_special else self._backend
        return ids_of(backend if begins or not texts else self._continuing, texts)

    def encode_parts(self, text: str, more: str) -> tuple[list[int], list[int]]:
        """Encode a string as `encode` does, and one that continues it, with no space between them.

        The ids of the second are those that follow in the whole string, unless a token of the whole
        string has characters of both.
        """
        first, whole = self.encode_batch([text, text + more])
        if whole[: len(first)] == first:
            return first, whole[len(first) :]
        return first, self.encode_batch([more], begins=False)[0]

    def count_unknown(self, ids: Sequence[int]) -> int:
        """Count the ids that stand for characters outside the vocabulary."""
        return 0 if self.unk_id is None else ids.count(self.unk_id)

    def unknown(self, text: str) -> list[str]:
        """Return the distinct words or characters of a string that are outside the vocabulary."""
        if not self.count_unknown(self.encode(text)):
            return []
        found = self._backend.encode(text, add_special_tokens=False)
        spans = zip(found.ids, found.offsets, strict=True)
        return list(dict.fromkeys(text[slice(*span)] for id, span in spans if id == self.unk_id))

    def encode_sequence(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encode a complete sequence: `prefix_ids`, the ids of the string, `suffix_ids`.

        With `allow_special`, the ids are those of transformers' `AutoTokenizer`; without it, those
        of `AutoTokenizer` with `split_special_tokens=True`.
        """
        ids = self.encode(text, allow_special=allow_special)
        return [*self.prefix_ids, *ids, *self.suffix_ids]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Encode any bytes; `decode_bytes` returns exactly the same bytes.

        Bytes that are UTF-8 are encoded as text, all other bytes one by one.

        Raises:
            WorkhorseError: `data` is not bytes, or it is not UTF-8 and the tokenizer is not
                byte-level.
        """
        if not isinstance(data, bytes | bytearray):
            raise WorkhorseError(f"{shown(data)} is not bytes; pass bytes, or use encode for a str")
        ids: list[int] = []
        while data:
            begins = not ids
            try:
                return ids + self.encode_batch([data.decode()], begins=begins)[0]
            except UnicodeDecodeError as error:
                ids += self.encode_batch([data[: error.start].decode()], begins=begins)[0]
                ids += (self._byte_ids[value] for value in data[error.start : error.end])
                data = data[error.end :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode ids to a string as the `tokenizers` library does; invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids, each in `[0, vocab_size)`.
            skip_special: True to skip special tokens instead of writing their names.

        Raises:
            WorkhorseError: an id is not an integer or is outside the vocabulary.
        """
        ids = checked_ids(ids, self.vocab_size)
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.push, ids)) + stream.finish()

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special=skip_special) for ids in batch]

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Decode ids to bytes, which may be invalid UTF-8."""
        pieces = self.pieces(ids)
        kept = [piece.id for piece in pieces if not (skip_special and piece.special)]
        pieces = pieces if len(kept) == len(pieces) else self.pieces(kept)
        return b"".join(piece.data for piece in pieces)

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Return each token with its bytes; `decode_bytes` joins them.

        Raises:
            WorkhorseError: an id is not an integer or is outside the vocabulary.
        """
        ids = checked_ids(ids, self.vocab_size)
        pieces: list[Piece] = []
        begun, bare = False, self._decoding.strip_start
        for token in ids:
            data = self._pieces[token] if begun else self._first_piece(token)
            begun = begun or data is not None
            if data and bare:
                data, bare = data.removeprefix(b" "), False
            pieces.append(Piece(token, data or b"", token in self._special_ids))
        return pieces

    def stream(
        self,
        *,
        skip_special: bool = False,
        shown: Collection[int] = (),
        after: Sequence[int] = (),
    ) -> StreamDecoder:
        """Return a decoder of ids that arrive one by one.

        Args:
            skip_special: True to skip special tokens.
            shown: ids of special tokens that are not skipped.
            after: ids that precede the stream, such as a prompt. They are decoded but not returned:
                the next ids may complete a character, and a word after them keeps its space.
        """
        skipped = self._special_ids.difference(shown) if skip_special else frozenset[int]()
        pieces, vocab_size = self._pieces, self.vocab_size

        def piece(token: int, is_first: bool) -> bytes | None:
            if not 0 <= token < vocab_size:
                checked_ids((token,), vocab_size)
            if token in skipped:
                return None
            return self._first_piece(token) if is_first else pieces[token]

        decoding = self._decoding
        decoder = StreamDecoder(piece, decoding.strip_start, decoding.strip_end)
        for token in checked_ids(after, vocab_size):
            decoder.push(token)
        return decoder

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token that is not the first of a sequence.

        Raises:
            WorkhorseError: the id is not an integer or is outside the vocabulary.
        """
        (token,) = checked_ids((token,), self.vocab_size)
        return self._pieces[token] or b""

    def display_bytes(self, token: int) -> bytes | None:
        """Return the bytes that show a token by itself; for a special token, its name.

        None if no token has the id, as for an extra row of a padded embedding.
        """
        if token in self._special_ids:
            return str(self._backend.id_to_token(token)).encode()
        return self._pieces[token] if 0 <= token < self.vocab_size else None

    def control_encoder(self, also: frozenset[str] = frozenset()) -> ControlEncoder:
        """Return an encoder that distinguishes control tokens from typed text that looks the same.

        Args:
            also: tokens that count as control tokens in addition to the special tokens.
        """
        if also not in self._control_encoders:
            self._control_encoders[also] = ControlEncoder(self._definition, also)
        return self._control_encoders[also]

    def token_id(self, token: str) -> int:
        """Return the id of a token, special or not, by its string in the vocabulary.

        Raises:
            WorkhorseError: the vocabulary has no such token.
        """
        if not isinstance(token, str):
            raise WorkhorseError(f"token={shown(token)} is not a string; pass a str")
        found = self._backend.token_to_id(token)
        if found is None:
            known = ", ".join(self.special_tokens) or "none"
            raise WorkhorseError(
                f"token {token!r} is not in the vocabulary; special tokens: {known}"
            )
        return found

    def save(self, folder: str | Path, *, model_type: str | None = None) -> None:
        """Write `tokenizer.json` and its companion files, which transformers can also read.

        Even if the write is interrupted, `load_tokenizer` reads either this tokenizer or the
        previous one.

        Args:
            folder: the folder to write to.
            model_type: type of the model in the folder, if any. If the tokenizer was read from a
                folder with a model of the same type, its original files are written back.

        Raises:
            WorkhorseError: transformers has special rules for the tokenizers of this model type and
                would produce different ids.
        """
        source = self.source
        if source is not None and model_type is not None and source.model_type == model_type:
            write_folder(Path(folder), source.files)
            return
        if model_type is not None:
            _check_readable(self.definition, model_type)
        texts = folder_texts(self.definition, self.roles, self.chat_templates)
        write_folder(Path(folder), {name: text.encode() for name, text in texts.items()})

    def with_prefix(self, *tokens: str) -> "Tokenizer":
        """Return a copy of this tokenizer that begins every complete sequence with `tokens`.

        Raises:
            WorkhorseError: a token is not in the vocabulary.
        """
        for token in tokens:
            self.token_id(token)
        backend = library_tokenizer(self.definition)
        set_affixes(backend, before=tokens)
        return Tokenizer(backend.to_str(), self.roles, self.chat_templates)

    def with_role(self, role: str, token: str) -> "Tokenizer":
        """Return a copy of this tokenizer in which `token` has a role, such as `bos`.

        Raises:
            WorkhorseError: the token is not in the vocabulary.
        """
        self.token_id(token)
        return Tokenizer(self.definition, {**self.roles, role: token}, self.chat_templates)

    def with_tokens(self, tokens: Sequence[str], *, special: bool = False) -> "Tokenizer":
        """Return a copy of this tokenizer with more tokens. Their ids follow the largest id.

        Args:
            tokens: names of the new tokens. In the input, they are matched before normalisation.
            special: True if typed text never becomes one of them.

        Raises:
            WorkhorseError: a name is empty or in use, the tokenizer has unused ids, or it could not
                decode text with the token: SentencePiece may add a space after it, and byte-level
                tokenizers read the letters of `für` as bytes.
        """
        known = {*self.vocabulary}
        for name in tokens:
            ids = self.encode(name)
            if not name or name in known or (len(ids) == 1 and self.decode(ids) == name):
                fact = "is in the vocabulary already" if name else "is empty"
                raise WorkhorseError(f"added token {name!r} {fact}; remove it")
            known.add(name)
        backend = library_tokenizer(self.definition)
        add_tokens(backend, [AddedToken(t, special=special, normalized=False) for t in tokens])
        found = Tokenizer(backend.to_str(), self.roles, self.chat_templates)
        for name in tokens:
            if found.token_id(name) < self.vocab_size:
                raise WorkhorseError(
                    f"the tokenizer has unused ids, so {name!r} gets the id {found.token_id(name)} "
                    "among the ids of other tokens; use a tokenizer without gaps"
                )
            text = f"a{name}b"
            before, after = (one.decode(one.encode(text)).lstrip(" ") for one in (self, found))
            if not special and before == text != after:
                raise WorkhorseError(
                    f"this tokenizer would decode {text!r} as {after!r} with the added token "
                    f"{name!r}; remove it"
                )
        return found

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens and their ids."""
        return self._backend.get_vocab()

    @property
    def definition(self) -> str:
        """The content of this tokenizer's `tokenizer.json`."""
        return json.dumps(self._definition, indent=2, ensure_ascii=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the tokenizer's definition and roles."""
        facts = {"tokenizer": self._definition, "roles": self.roles}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        model = self._definition["model"]["type"]
        return f"<Tokenizer {model}, {self.vocab_size:,} tokens, {self.fingerprint[:8]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.definition, self.roles, self.chat_templates)

    @cached_property
    def _matching_special(self) -> tokenizers.Tokenizer:
        """A copy that matches special tokens in the input.

        A copy is needed because the library's option applies to the whole tokenizer.
        """
        return library_tokenizer(self.definition)

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """A copy of the backend that adds or removes no space before its input."""
        rules = {name: self._definition[name] for name in ("normalizer", "pre_tokenizer")}
        changed = json.loads(
            json.dumps(rules),
            object_hook=lambda part: part | _WITHOUT_PREFIX.get(str(part.get("type")), {}),
        )
        return Tokenizer(json.dumps({**self._definition, **changed}))._backend

    @cached_property
    def _pieces(self) -> list[bytes | None]:
        """The bytes of each id; None for an id without a token."""
        pieces: list[bytes | None] = [None] * self.vocab_size
        for token, number in self._backend.get_vocab().items():
            pieces[number] = self._decoding.piece(token)
        return pieces

    def _first_piece(self, token: int) -> bytes | None:
        if self._decoding.first is None:
            return self._pieces[token]
        name = self._backend.id_to_token(token)
        return None if name is None else self._decoding.first_piece(name)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _byte_ids(self) -> list[int]:
        """The id of the token for each byte value; an error if the tokenizer is not byte-level."""
        ids = [self._backend.token_to_id(character) for character in BYTE_ALPHABET]
        decoder = self._definition["decoder"] or {}
        if decoder.get("type") != "ByteLevel" or None in ids:
            raise WorkhorseError(
                "the bytes are not UTF-8, and this tokenizer cannot encode single bytes; use a "
                "byte-level tokenizer (bpe or bytes)"
            )
        return ids  # pyright: ignore[reportReturnType]

    def _role_id(self, role: str) -> int | None:
        name = self.roles.get(role)
        if name is None:
            return None
        found = self._backend.token_to_id(name)
        if found is None:
            raise WorkhorseError(
                f"the {role} token {name!r} is not in the vocabulary; use a token of the vocabulary"
            )
        return found


def _check_readable(definition: str, model_type: str) -> None:
    from workhorse.tokenizers.huggingface.read import as_read_beside

    if json.loads(as_read_beside(definition, model_type)) != json.loads(definition):
        raise WorkhorseError(
            f"transformers has special rules for tokenizers of model type {model_type!r}, and this "
            "one would produce different ids; write the model as another type"
        )
