"""Blocks of keys and values: who holds which, and how kernels read them."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from workhorse.nn.shapes import Keys

BLOCK = 32
"""Tokens in a block."""
EMPTY, SPILL = 0, 1
"""Two blocks of every pool: one that nothing is ever written to, which tables show where a text has
none, and one that takes what is not kept and is never shown."""
Reach = int | None
"""How many of the latest positions a query sees, itself included; None: all of them."""


class InBlocks(NamedTuple):
    """Keys or values where they lie, for kernels that read tables of blocks."""

    blocks: Float[Tensor, "kv_heads blocks block width"]
    table: Int[Tensor, "batch blocks_of_a_text"]
    first: int
    """Blocks that the tables begin with and nobody sees."""
    slots: int
    """Slots from there on that a text may fill."""
    run: int | None = None
    """Where there is one text, and its blocks follow one another: the first of them."""

    def gathered(self) -> Keys:
        """Side by side, (batch, kv_heads, slots, width): copied where they do not lie so."""
        heads, _, block, width = self.blocks.shape
        if self.run is not None:
            start = (self.run + self.first) * block
            return self.blocks.flatten(1, 2)[None, :, start : start + self.slots]
        table = self.table[:, self.first :]
        taken = self.blocks.index_select(1, table.flatten())  # several times faster than indexing
        taken = taken.view(heads, len(table), -1, width)
        return taken.transpose(0, 1)[:, :, : self.slots]


class Pool:
    """Which blocks are in use, and by how many.

    Args:
        count: blocks, the two of no text included.
        reach: of the layers whose keys they hold.
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
        """Blocks that texts can hold together."""
        return self.count - SPILL - 1

    @property
    def is_full(self) -> bool:
        return not self._unused

    def take(self) -> tuple[int, bool]:
        """The first block that nobody holds, and whether it was held before."""
        block = heappop(self._unused)
        self.holders[block] = 1
        again = block in self._used_before
        self._used_before.add(block)
        return block, again

    def share(self, block: int) -> int:
        """One more holds it."""
        if block != EMPTY:
            self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """One fewer holds it."""
        if block == EMPTY:
            return
        self.holders[block] -= 1
        if not self.holders[block]:
            heappush(self._unused, block)


@dataclass(eq=False)
class CachedText:
    """One text in a cache.

    Attributes:
        most: tokens it may grow to.
        length: tokens it holds.
        tables: its blocks in order, for each reach; `EMPTY` where they were let go.
    """

    most: int
    length: int = 0
    tables: dict[Reach, list[int]] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether it was let go."""
        return not self.tables
