"""Which source each training row comes from: exact shares in every block, in a seeded order."""

from collections.abc import Sequence

import numpy as np

from workhorse.data.rows.permutation import Indices, derive, permute
from workhorse.errors import WorkhorseError

MIXING_BLOCK = 10_000
"""Number of rows over which the shares are exact, to one row."""


class Mixture:
    """Assigns rows to sources: a pure function of the row's number. No source skips a row.

    Args:
        names: of the sources, for messages.
        weights: positive, in any unit.
        seed: of the order inside each block.

    Raises:
        WorkhorseError: a share too small for one row in a block.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        shares = np.asarray(weights) / np.sum(weights) * MIXING_BLOCK
        # Largest remainders: round down, then one more to those that lost most.
        self.counts = np.floor(shares).astype(np.int64)
        missing = MIXING_BLOCK - int(self.counts.sum())
        self.counts[np.argsort(self.counts - shares, kind="stable")[:missing]] += 1
        for name, count, weight in zip(names, self.counts, weights, strict=True):
            if count == 0:
                raise WorkhorseError(
                    f"weight {weight:g} gives {name!r} less than one row in {MIXING_BLOCK:,}; "
                    "raise it or drop the source"
                )
        self._ends = np.cumsum(self.counts)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """For each row of the run, the index of its source and its number within that source."""
        if len(self.counts) == 1:
            return np.zeros_like(indices), indices
        blocks = indices // MIXING_BLOCK
        slots = np.empty_like(indices)
        for block in sorted(set(blocks.tolist())):
            chosen = blocks == block
            key = derive(self.seed, "mixing", block)
            slots[chosen] = permute(indices[chosen] % MIXING_BLOCK, MIXING_BLOCK, key)
        sources = np.searchsorted(self._ends, slots, side="right")
        within = slots - (self._ends - self.counts)[sources]
        return sources, blocks * self.counts[sources] + within
