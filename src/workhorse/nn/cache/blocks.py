"""Blocks of keys and values: which sequences hold each, and how kernels read them."""

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from workhorse.nn.shapes import Keys

BLOCK = 32
"""Tokens in a block."""
EMPTY, SPILL = 0, 1
"""Two reserved blocks of every pool. `EMPTY` is never written; tables refer to it where a sequence
has no block. `SPILL` receives writes that are discarded; no table refers to it."""
Reach = int | None
"""How many of the latest positions a query sees, including its own; None: all of them."""


class InBlocks(NamedTuple):
    """Keys or values in their blocks, for kernels that read block tables."""

    blocks: Float[Tensor, "kv_heads blocks block width"]
    table: Int[Tensor, "batch blocks_of_a_sequence"]
    first: int
    """Number of blocks at the beginning of the tables that no query sees."""
    slots: int
    """Number of slots after those blocks that a sequence may fill."""
    run: int | None = None
    """The first block of the only sequence, if its blocks are consecutive; otherwise None."""

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
    """The blocks of the layers of one reach, with reference counts.

    A block can be labelled with the prefix whose last tokens it holds. A labelled block keeps its
    keys and values after its last holder has released it, until the pool needs it for other tokens:
    then the least recently used one is taken.

    Args:
        count: number of blocks, including the two reserved ones.
        reach: reach of the layers whose keys and values the blocks hold.

    Attributes:
        holders: number of sequences that hold each block.
    """

    def __init__(self, count: int, reach: Reach) -> None:
        self.count = count
        self.reach = reach
        self._used_before: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Release every block and forget every prefix."""
        self.holders = [0] * self.count
        self._unused = list(range(SPILL + 1, self.count))  # a heap, so that blocks are consecutive
        self._kept: OrderedDict[int, None] = OrderedDict()  # labelled, without holders, by use
        self._blocks: dict[bytes, int] = {}
        self._labels: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Number of blocks that can hold tokens."""
        return self.count - SPILL - 1

    @property
    def available(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._unused) + len(self._kept)

    def take(self) -> tuple[int, bool]:
        """Take an available block; returns it, and whether it has been used before."""
        if self._unused:
            block = heappop(self._unused)
        else:
            block, _ = self._kept.popitem(last=False)
            del self._blocks[self._labels.pop(block)]
        self.holders[block] = 1
        again = block in self._used_before
        self._used_before.add(block)
        return block, again

    def share(self, block: int) -> int:
        """Add a holder."""
        if block != EMPTY:
            self._kept.pop(block, None)
            self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Remove a holder. A block without holders is available."""
        if block == EMPTY:
            return
        self.holders[block] -= 1
        if self.holders[block]:
            return
        if block in self._labels:
            self._kept[block] = None
        else:
            heappush(self._unused, block)

    def label(self, block: int, prefix: bytes) -> None:
        """Label a block with the prefix it ends, unless the block or the prefix has a label."""
        if block != EMPTY and block not in self._labels and prefix not in self._blocks:
            self._labels[block] = prefix
            self._blocks[prefix] = block

    def find(self, prefix: bytes) -> int | None:
        """The block that ends a prefix."""
        return self._blocks.get(prefix)


@dataclass(eq=False)
class CachedSequence:
    """The part of a sequence that is in a cache.

    Attributes:
        length: number of tokens in the cache.
        tables: its blocks in order, for each reach; `EMPTY` where a block was released.
        changes: counts changes of the tables, so that a `PagedView` notices them.
    """

    length: int = 0
    tables: dict[Reach, list[int]] = field(default_factory=dict)
    changes: int = 0
