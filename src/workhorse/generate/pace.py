"""How many prompt tokens a step processes beside the requests that decode."""

from typing import Self

from workhorse.errors import WorkhorseError, shown

FEWEST = 8
"""Minimum number of prompt tokens per step, so that every prompt is processed."""
FIRST = 16
"""Number of prompt tokens per step until times are known."""
WEIGHT = 0.2
"""Weight of a new time in the running means."""


class PromptPace:
    """Chooses the number of prompt tokens so that they lengthen a step by a given fraction.

    Times differ from run to run, and so do the numbers. They affect rounding only, and nothing if
    the decoder is invariant (`Backend.is_invariant`).

    Args:
        share: the fraction of the time of a step without prompts.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._step: float | None = None
        """Mean seconds of a step without prompts."""
        self._token: float | None = None
        """Mean seconds that a prompt token adds to a step."""

    @classmethod
    def checked(cls, share: object) -> Self:
        """Create it, or raise a WorkhorseError if `share` is not a positive number."""
        if not isinstance(share, int | float) or not share > 0:
            raise WorkhorseError(f"prompt_share={shown(share)} is not a positive number; give one")
        return cls(share)

    @property
    def tokens(self) -> int:
        """Maximum number of prompt tokens of the next step."""
        if self._step is None or self._token is None:
            return FIRST
        return max(FEWEST, int(self._share * self._step / max(self._token, 1e-9)))

    def note(self, prompt_tokens: int, seconds: float) -> None:
        """Note the time of a step in which requests decoded beside `prompt_tokens` tokens."""
        if not prompt_tokens:
            self._step = _mean(self._step, seconds)
        elif self._step is not None:
            self._token = _mean(self._token, max(0.0, seconds - self._step) / prompt_tokens)


def _mean(known: float | None, new: float) -> float:
    """Update a running mean. Outliers, as when the machine is busy, count only a little."""
    return new if known is None else known + WEIGHT * (min(new, 2 * known) - known)
