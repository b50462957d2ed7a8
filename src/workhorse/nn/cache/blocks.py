"""Blocks of keys and values: how many texts hold each, and how kernels read them."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from workhorse.nn.shapes import Keys

BLOCK = 32
"""Tokens in a block."""
EMPTY, SPILL = 0, 1
"""Two reserved blocks of every pool. `EMPTY` is never written; tables refer to it where a text has
no block. `SPILL` takes writes that are not kept; no table refers to it."""
Reach = int | None
"""How many of the latest positions a query sees, its own included; None: all of them."""


class InBlocks(NamedTuple):
    """Keys or values in their blocks, for kernels that read block tables."""

    blocks: Float[Tensor, "kv_heads blocks block width"]
    table: Int[Tensor, "batch blocks_of_a_text"]
    first: int
    """Blocks at the beginning of the tables that no query sees."""
    slots: int
    """Slots after those blocks that a text may fill."""
    run: int | None = None
    """The first block of the only text, if its blocks are consecutive; otherwise None."""

    def gathered(self) -> Keys:
        """One tensor, (batch, kv_heads, slots, width): a view of a run, otherwise a copy."""
        heads, _, block, width = self.blocks.shape
        if self.run is not None:
            start = (self.run + self.first) * block
            return self.blocks.flatten(1, 2)[None, :, start : start + self.slots]
        table = self.table[:, self.first :]
        taken = self.blocks.index_select(1, table.flatten())  # several times faster than indexing
        taken = taken.view(heads, len(table), table.shape[1] * block, width)
        return taken.transpose(0, 1)[:, :, : self.slots]


class Pool:
    """The blocks of one reach, with reference counts.

    Args:
        count: number of blocks, including the two reserved ones.
        reach: of the layers whose keys and values the blocks hold.
    """

    def __init__(self, count: int, reach: Reach) -> None:
        self.count = count
        self.reach = reach
        self.holders = [0] * count
        self.reserved = 0
        self._unused = list(range(SPILL + 1, count))
        heapify(self._unused)
        self._used_before: set[int] = set()

    @property
    def room(self) -> int:
        """The number of blocks that all texts together can hold."""
        return self.count - SPILL - 1

    @property
    def is_full(self) -> bool:
        return not self._unused

    def take(self) -> tuple[int, bool]:
        """Take the first unused block; returns it, and whether it has been used before."""
        block = heappop(self._unused)
        self.holders[block] = 1
        again = block in self._used_before
        self._used_before.add(block)
        return block, again

    def share(self, block: int) -> int:
        """Add a holder."""
        if block != EMPTY:
            self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Remove a holder; a block without holders is unused."""
        if block == EMPTY:
            return
        self.holders[block] -= 1
        if not self.holders[block]:
            heappush(self._unused, block)


@dataclass(eq=False)
class CachedText:
    """One text in a cache.

    Attributes:
        most: the number of tokens it may grow to.
        length: the number of tokens it holds.
        tables: its blocks in order, for each reach; `EMPTY` where a block was released.
    """

    most: int
    length: int = 0
    tables: dict[Reach, list[int]] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self.tables
