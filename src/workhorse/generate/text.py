"""New text that is safe to show: whole characters, and never part of a stop text."""

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Turns token ids into text one by one, never splitting a character."""

    def push(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class StopScanner:
    """Passes text through until the first of `stops` is complete.

    Text that may begin a stop is held back until that is decided. The stop that
    *ends* first counts (the longest, if several end there), so the result does not depend on how
    the text is split over calls.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            self.stopped = True
            self._held = ""
            end, negative_length = min(ends)
            return text[: end + negative_length]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text still held back, which did not become a stop."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is the beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one result: takes tokens, returns text that is safe to show."""

    def __init__(self, tokens: TokenStream, stops: Sequence[str]) -> None:
        self._tokens = tokens
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text is complete; no text is returned after it."""
        return self._scanner.stopped

    def push(self, token: int) -> str:
        return self._scanner.push(self._tokens.push(token))

    def finish(self) -> str:
        """The text still held back. A character that was never completed becomes U+FFFD."""
        return self._scanner.push(self._tokens.finish()) + self._scanner.finish()
