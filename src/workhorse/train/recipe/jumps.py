"""Jumps of the loss: what counts as one."""

import statistics
from collections.abc import Sequence

from pydantic import Field

from workhorse.config.base import Config


class JumpConfig(Config):
    """Where the loss jumps, go back to the last checkpoint and on with the rows after the jump.

    So did PaLM, by hand (2204.02311 §5.1): the same rows after another checkpoint did no harm.
    """

    deviations: float = Field(default=8.0, gt=0)
    """How many standard deviations above the mean of the last `window` normal losses is a jump."""
    window: int = Field(default=100, ge=2, le=10_000)
    """Steps that a loss is compared with."""
    in_a_row: int = Field(default=2, ge=1)
    """Jumps in a row, after which the run goes back. Meanwhile no checkpoint is saved."""
    most: int = Field(default=5, ge=1)
    """Times that a run goes back; the next jump ends it."""

    def is_jump(self, loss: float, before: Sequence[float]) -> bool:
        """Whether a loss jumps from those before, of which there are `window`, or too few."""
        if len(before) < self.window:
            return False
        return loss > statistics.fmean(before) + self.deviations * statistics.pstdev(before)
