"""Limits the factor by which the rules of a `tokenizer.json` can lengthen a string.

Six consecutive rules that each replace one character by ten turn a character into a million. The
`tokenizers` library aborts the whole process when memory is full.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.backend import rules
from workhorse.tokenizers.pieces import BYTE_ALPHABET

MAX_GROWTH = 256
"""Maximum number of characters that one character may become. Real rules need few: NFKC, 18."""
UTF8_BYTES = 4
"""Maximum number of bytes of a character."""


def check_growth(definition: Mapping[str, Any]) -> None:
    """Check that a tokenizer cannot turn one character into more than `MAX_GROWTH` characters.

    The regular expression of a rule is assumed to match one character or more.

    Raises:
        WorkhorseError: the rules of the `tokenizer.json` can exceed the limit.
    """
    before = [*rules(definition.get("normalizer")), *rules(definition.get("pre_tokenizer"))]
    _check("normalizer and pre-tokenizer", before)
    after = [rule for rule in rules(definition.get("decoder")) if rule["type"] == "Replace"]
    _check("decoder", after)


def _check(what: str, applied: Sequence[Mapping[str, Any]]) -> None:
    lengths = _Lengths()
    for rule in reversed(applied):
        lengths.precede(rule)
        if lengths.most > MAX_GROWTH:
            raise WorkhorseError(
                f"the {what} can turn one character into more than {MAX_GROWTH}, the limit; "
                "use the original file"
            )


class _Lengths:
    """For each character, an upper bound of the number of characters that rules turn it into."""

    def __init__(self) -> None:
        self._named: dict[str, float] = {}
        self._other = 1.0
        """Bound for characters that are not in `_named`."""
        self._least = 0.0
        """All bounds are at least this large, because some rules may match any character."""
        self.most = 1.0
        """Largest bound so far, including those of prefixes that rules add to the input."""

    def precede(self, rule: Mapping[str, Any]) -> None:
        """Include another rule in the bounds, which is applied before all rules included so far.

        The output of this rule is the input of the others, so the factors multiply.
        """
        match rule:
            case {"type": "Prepend", "prepend": new}:
                self._reach(self._of(new))
            case {"type": "Replace", "pattern": {"String": ""}, "content": new}:
                self._insert(2 * self._of(new))  # around every character
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                share = self._of(new) / len(old)
                self._named |= {one: max(self._of(one), share) for one in old}
                self._reach(share)
            case {"type": "Replace", "content": new}:
                self._least = max(self._least, self._of(new))
                self._reach(self._least)
            case {"type": "Precompiled", "precompiled_charsmap": table}:
                self._least = max(self._least, *map(self._of, _written(table)))
                self._reach(self._least)
            case {"type": "ByteLevel"}:
                self._spell()

    def _of(self, text: str) -> float:
        return sum(max(self._named.get(one, self._other), self._least) for one in text)

    def _reach(self, length: float) -> None:
        self.most = max(self.most, length)

    def _insert(self, length: float) -> None:
        if length:
            self._named = {one: before + length for one, before in self._named.items()}
            self._other += length
            self._least += length
            self._reach(self.most + length)

    def _spell(self) -> None:
        """Account for a byte-level rule: each byte becomes the character that stands for it."""
        stand_ins = [self._of(one) for one in BYTE_ALPHABET]
        named = {*self._named, *BYTE_ALPHABET}
        self._named = {one: sum(stand_ins[byte] for byte in one.encode()) for one in named}
        self._other = UTF8_BYTES * max(stand_ins)
        self._reach(max(self._other, *self._named.values()))


def _written(table: str) -> list[str]:
    """Return the replacement strings in SentencePiece's compiled normalisation table.

    The table consists of the size of a trie in bytes, the trie, and NUL-terminated strings.
    """
    data = base64.b64decode(table)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return texts.decode("utf-8", "replace").split("\0")
