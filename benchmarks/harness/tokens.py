"""Random prompts, and the rates of new tokens."""

import random
import time


def random_tokens(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for every contestant."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


class TokenClock:
    """Measures token rates; call `tick` whenever every row has its next token.

    The first token of a row belongs to the prefill, all others to decoding.
    """

    def __init__(self, rows: int, prompt_tokens: int) -> None:
        self._rows, self._prompt_tokens = rows, prompt_tokens
        self._started = self._first = self._last = time.perf_counter()
        self._steps = 0

    def tick(self) -> None:
        """Record that every row has one more token."""
        self._last = time.perf_counter()
        self._first = self._last if self._steps == 0 else self._first
        self._steps += 1

    def rates(self, new_tokens: int) -> dict[str, float]:
        """Tokens per second: of the prompts (`prefill`), and new ones (`decode`).

        Raises:
            AssertionError: the number of tokens is not the requested one.
        """
        assert self._steps == new_tokens, f"{self._steps} tokens of {new_tokens}"
        rates = {"prefill": self._rows * self._prompt_tokens / (self._first - self._started)}
        if self._steps > 1:
            rates["decode"] = self._rows * (self._steps - 1) / (self._last - self._first)
        return rates
