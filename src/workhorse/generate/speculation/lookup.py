"""Guesses from the text itself, for speculative decoding."""

from collections.abc import Sequence

from workhorse.generate.request import Guess, Request
from workhorse.generate.speculation.speculate import SamplingRule

LONGEST_MATCH, SHORTEST_MATCH = 3, 2  # a single token recurs too often to predict the next


class PromptLookup:
    """Guesses that a text continues as it did after the latest earlier occurrence of its ending.

    Source: Saxena, "Prompt Lookup Decoding" (2023), which takes the first occurrence.
    """

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def propose(
        self, rows: Sequence[Request], most: Sequence[int], rule: SamplingRule
    ) -> list[Guess]:
        del rule
        return [
            Guess(self._indices.setdefault(row, _Index()).continuation(row.tokens, n))
            for row, n in zip(rows, most, strict=True)
        ]

    def leave(self, row: Request) -> None:
        self._indices.pop(row, None)

    def reset(self) -> None:
        self._indices.clear()


class _Index:
    """Where each n-gram of a growing text occurred last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0  # ends up to here are in the index

    def continuation(self, text: Sequence[int], n: int) -> tuple[int, ...]:
        """The n tokens that would follow; none if the end of the text has not occurred before."""
        # The text's own end is indexed by the next call: nothing follows it yet.
        for end in range(self._read + 1, len(text)):
            for gram in _grams_before(text, end):
                self._ends[gram] = end
        self._read = max(self._read, len(text) - 1)
        for gram in _grams_before(text, len(text)):
            if (start := self._ends.get(gram)) is not None:
                # Past the end of the text the guess continues itself, as a repeating text would.
                period = len(text) - start
                return tuple(text[start + step % period] for step in range(n))
        return ()


def _grams_before(text: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The n-grams that end at `end`, longest first."""
    longest = min(LONGEST_MATCH, end)
    return [tuple(text[end - n : end]) for n in range(longest, SHORTEST_MATCH - 1, -1)]
