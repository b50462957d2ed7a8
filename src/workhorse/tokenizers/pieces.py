"""What each token id adds to a text, in bytes, and text from ids that come one by one.

The decoders of the `tokenizers` library turn a whole list of ids into a text. A decoder for
streaming needs more: what one id adds, whatever comes later. All decoders of language models can be
read that way: a table of bytes per id, and perhaps a space to drop at the very start.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workhorse.errors import WorkhorseError


def _byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable stand-ins: the character for each byte value."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (value for value in range(256) if value not in printable)
    stand_in = {value: chr(256 + index) for index, value in enumerate(others)}
    return tuple(stand_in.get(value, chr(value)) for value in range(256))


BYTE_ALPHABET = _byte_alphabet()
"""Byte value -> the character that stands for it in a byte-level vocabulary."""
_BYTE_OF = {character: value for value, character in enumerate(BYTE_ALPHABET)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Callable[[str | bytes], str | bytes]


@dataclass(frozen=True)
class Decoding:
    """How the vocabulary's strings become text: steps per token, then a cut at the start."""

    steps: tuple[Step, ...]
    strip_space: bool
    """Drop one space at the start of a text."""
    spaced: bool = False
    """Tokens are words: a control token has a space before it too."""

    def control_piece(self, token: str) -> bytes:
        """The bytes of a control token: its name, whatever the steps would make of it."""
        return (" " + token if self.spaced else token).encode()

    def piece(self, token: str) -> bytes:
        """The bytes that one token of the vocabulary adds to a text."""
        piece: str | bytes = token
        for step in self.steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode()


def read_decoding(definition: dict[str, Any] | None) -> Decoding:
    """The meaning of the `decoder` in a `tokenizer.json`.

    Raises:
        WorkhorseError: a decoder that cannot work token by token.
    """
    steps: list[Step] = []
    strip = fused = spaced = False
    for part in _flat(definition):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(_from_byte_alphabet)
            case {"type": "ByteFallback"}:
                steps.append(_from_byte_token)
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                steps.append(_on_text(lambda text, old=old, new=new: text.replace(old, new)))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                strip = True
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                steps.append(_on_text(lambda text, mark=mark: text.replace(mark, " ")))
                strip = scheme != "never"
            case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
                steps.append(_on_text(_word_piece(prefix, cleanup)))
                strip = spaced = True
            case {"type": "None"}:
                steps.append(_on_text(lambda text: " " + text))
                strip = spaced = True
            case _:
                raise WorkhorseError(
                    f"the decoder {part.get('type')!r} cannot stream text; use a tokenizer with a "
                    "ByteLevel, ByteFallback, Metaspace or WordPiece decoder"
                )
    return Decoding(tuple(steps), strip, spaced)


def _flat(definition: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if definition is None:
        return [{"type": "None"}]
    if definition["type"] == "Sequence":
        return [part for inner in definition["decoders"] for part in _flat(inner)]
    return [definition]


def _on_text(change: Callable[[str], str]) -> Step:
    return lambda piece: piece if isinstance(piece, bytes) else change(piece)


def _from_byte_alphabet(piece: str | bytes) -> str | bytes:
    if isinstance(piece, bytes) or not all(character in _BYTE_OF for character in piece):
        return piece  # an added token that stands for itself
    return bytes(_BYTE_OF[character] for character in piece)


def _from_byte_token(piece: str | bytes) -> str | bytes:
    match = None if isinstance(piece, bytes) else _BYTE_TOKEN.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str], str]:
    def change(token: str) -> str:
        text = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for spaced in (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"):
            text = text.replace(spaced, spaced[1:]) if cleanup else text
        return text

    return change


class StreamDecoder:
    """Text from token ids that come one by one; the same text as decoding them at once.

    `push` gives the characters that are now complete, so what it gave never changes. Bytes that are
    no UTF-8 become U+FFFD.
    """

    def __init__(self, piece_of: Callable[[int], bytes], strip_space: bool) -> None:
        self._piece_of = piece_of
        self._at_start = strip_space
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that one more id completes; often empty inside a character."""
        piece = self._piece_of(token)
        if self._at_start and piece:
            piece = piece.removeprefix(b" ")
            self._at_start = False
        return self._characters.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD if the ids end inside a character."""
        return self._characters.decode(b"", final=True)


def join_pieces(pieces: Sequence[bytes], strip_space: bool) -> bytes:
    """The bytes of a whole text."""
    text = b"".join(pieces)
    return text.removeprefix(b" ") if strip_space else text
