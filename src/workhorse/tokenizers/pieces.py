"""Decodes token ids one by one.

The decoders of the `tokenizers` library decode a whole list of ids. Streaming needs the bytes of
one id, independent of the ids after it. For all usual decoders, a table of the bytes of each id is
enough, and in some cases a space to remove at the start or end.
"""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.backend import rules


def _byte_alphabet() -> tuple[str, ...]:
    """Return the printable character for each byte value, as in GPT-2."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (value for value in range(256) if value not in printable)
    stand_in = {value: chr(256 + index) for index, value in enumerate(others)}
    return tuple(stand_in.get(value, chr(value)) for value in range(256))


BYTE_ALPHABET = _byte_alphabet()
"""Byte value -> the character that stands for it in a byte-level vocabulary."""
_BYTE_OF = {character: value for value, character in enumerate(BYTE_ALPHABET)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_WORDS = {"type": "WordPiece", "prefix": "\ue000no prefix", "cleanup": False}
"""The decoder for a `tokenizer.json` without a decoder: each token is a word."""

Step = Callable[[str | bytes], str | bytes]


class ByteToken(bytes):
    """The byte of a byte token such as `<0x41>`; it may be only a part of a character."""


@dataclass(frozen=True)
class Decoding:
    """The rules that decode tokens: steps for each token, then spaces to remove at the ends."""

    steps: tuple[Step, ...]
    first: Step | None = None
    """Replaces `steps` for the first token of a sequence, to decode it without a space before it.
    If None, the first token is decoded like all others."""
    strip_start: bool = False
    """True to remove one space at the start of the decoded string."""
    strip_end: bool = False
    """True to remove one space at the end of the decoded string."""

    def piece(self, token: str) -> bytes:
        """Return the bytes of a token of the vocabulary."""
        return self._through(token, self.steps)

    def first_piece(self, token: str) -> bytes:
        """Return the bytes of a token at the start of a sequence."""
        return self.piece(token) if self.first is None else self._through(token, (self.first,))

    def _through(self, token: str, steps: tuple[Step, ...]) -> bytes:
        piece: str | bytes = token
        for step in steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode()


def read_decoding(definition: dict[str, Any] | None) -> Decoding:
    """Read the rules of the `decoder` in a `tokenizer.json`.

    Raises:
        WorkhorseError: the decoder cannot decode token by token.
    """
    steps: list[Step] = []
    first: Step | None = None
    start = end = fused = False
    for part in rules(definition or _WORDS):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(_from_byte_alphabet)
            case {"type": "ByteFallback"}:
                steps.append(_from_byte_token)
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                steps.append(_replacing(old, new))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                start = True
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                steps.append(_replacing(mark, " "))
                first = None if scheme == "never" else _replacing(mark, "")
            case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
                steps.append(_on_text(_word_piece(prefix, cleanup)))
                first = _on_text(_clean if cleanup else str)
            case {"type": "BPEDecoder", "suffix": suffix}:
                steps.append(_replacing(suffix, " "))
                end = True
            case _:
                raise WorkhorseError(
                    f"the decoder {part.get('type')!r} cannot decode token by token; use a "
                    "tokenizer with a ByteLevel, ByteFallback, Metaspace or WordPiece decoder"
                )
    return Decoding(tuple(steps), first, start, end)


def _on_text(change: Callable[[str], str]) -> Step:
    return lambda piece: piece if isinstance(piece, bytes) else change(piece)


def _from_byte_alphabet(piece: str | bytes) -> str | bytes:
    if isinstance(piece, bytes) or not all(character in _BYTE_OF for character in piece):
        return piece  # an added token: its content is the text
    return bytes(_BYTE_OF[character] for character in piece)


def _replacing(old: str, new: str) -> Step:
    return _on_text(lambda text: text.replace(old, new))


def _from_byte_token(piece: str | bytes) -> str | bytes:
    match = None if isinstance(piece, bytes) else _BYTE_TOKEN.fullmatch(piece)
    return ByteToken(bytes.fromhex(match[1])) if match else piece


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str], str]:
    def change(token: str) -> str:
        text = token[len(prefix) :] if token.startswith(prefix) else " " + token
        return _clean(text) if cleanup else text

    return change


def _clean(text: str) -> str:
    for spaced in (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


class StreamDecoder:
    """Decodes token ids one by one, to the same string as decoding them at once.

    `push` returns only final text: whole characters. A run of single-byte tokens is held back until
    another token follows, because a run that is not UTF-8 becomes one U+FFFD per byte. Other bytes
    that are not UTF-8 also become U+FFFD.
    """

    def __init__(
        self, piece_of: Callable[[int, bool], bytes | None], strip_start: bool, strip_end: bool
    ) -> None:
        self._piece_of = piece_of
        self._is_first = True
        self._at_start = strip_start
        self._strip_end = strip_end
        self._space = ""  # a space that is held back, because it is removed at the end
        self._run = b""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add an id and return the text that is now final; empty if a character is incomplete."""
        piece = self._piece_of(token, self._is_first)
        if piece is None:
            return ""
        self._is_first = False
        if isinstance(piece, ByteToken):
            self._run += piece
            return ""
        return self._given(self._byte_run() + self._characters.decode(piece))

    def finish(self) -> str:
        """Return the text that `push` held back; U+FFFD if the ids end inside a character."""
        return self._given(self._byte_run() + self._characters.decode(b"", final=True))

    def _byte_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _given(self, text: str) -> str:
        if self._at_start and text:
            text = text.removeprefix(" ")
            self._at_start = False
        if self._strip_end and text:
            text = self._space + text
            self._space = " " if text.endswith(" ") else ""
            text = text.removesuffix(" ")
        return text
