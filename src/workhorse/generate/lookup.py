"""Guesses from the text itself, for speculative decoding."""

from collections.abc import Sequence

from workhorse.generate.row import Guess, Row
from workhorse.generate.samplers import History

LONGEST_MATCH, SHORTEST_MATCH = 3, 2  # a single token recurs too often to tell what follows


class PromptLookup:
    """Guesses that a text goes on as it did after the last tokens' latest earlier occurrence.

    Source: Saxena, "Prompt Lookup Decoding" (2023), which takes the first occurrence.
    """

    def __init__(self, rows: int) -> None:
        self._indices = [_Index() for _ in range(rows)]

    def propose(
        self, rows: Sequence[Row], most: Sequence[int], history: History | None
    ) -> list[Guess]:
        del history
        return [
            Guess(index.continuation(row.tokens, n))
            for index, row, n in zip(self._indices, rows, most, strict=True)
        ]

    def select_rows(self, index: Sequence[int]) -> None:
        self._indices = [self._indices[row] for row in index]

    def finish(self) -> None:
        """Nothing is kept."""


class _Index:
    """Where each n-gram of a growing text occurred last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0  # ends up to here are in the index

    def continuation(self, text: Sequence[int], n: int) -> tuple[int, ...]:
        """Up to n tokens; none where the end of the text is new to it."""
        # The text's own end is left for the next call: nothing follows it yet.
        for end in range(self._read + 1, len(text)):
            for gram in _grams_before(text, end):
                self._ends[gram] = end
        self._read = max(self._read, len(text) - 1)
        for gram in _grams_before(text, len(text)):
            if (start := self._ends.get(gram)) is not None:
                # Past the end it goes on into what is being guessed: the text would repeat itself.
                period = len(text) - start
                return tuple(text[start + step % period] for step in range(n))
        return ()


def _grams_before(text: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The n-grams that end there, longest first."""
    longest = min(LONGEST_MATCH, end)
    return [tuple(text[end - n : end]) for n in range(longest, SHORTEST_MATCH - 1, -1)]
