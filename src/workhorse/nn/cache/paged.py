"""A paged cache: sequences are added, forked and removed at any time, and share prefixes.

Keys and values are stored in blocks of `BLOCK` tokens. A block table lists the blocks of a sequence
(PagedAttention, 2309.06180). Several sequences may share a block; it is copied on write. Layers
with the same attention window, or without one, share their block tables. A sequence releases blocks
that have left the window. Blocks are allocated when tokens need them, not in advance.

A `PagedView` is a batch of cached sequences in a forward pass.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.nn.shapes import Keys, NewKeys, NewValues

BLOCK = 32
"""Number of tokens in a cache block."""
EMPTY, SPILL = 0, 1
"""Indices of two reserved blocks in every `Pool`. `EMPTY` is never written; it fills block-table
entries that have no block. `SPILL` receives writes to be discarded; no block table contains it."""
Reach = int | None
"""The attention window of a layer: how many of the latest positions a query sees, including its
own; None: all positions."""


class InBlocks(NamedTuple):
    """Keys or values in cache blocks, for attention kernels that read block tables."""

    blocks: Float[Tensor, "kv_heads blocks block width"]
    table: Int[Tensor, "batch blocks_of_a_sequence"]
    first: int
    """Number of leading entries to skip in each row of `table`: no query sees these blocks."""
    slots: int
    """Number of token slots to read per sequence, counted after the skipped blocks."""
    run: int | None = None
    """Index of the first block, if there is one sequence and its blocks are consecutive; otherwise
    None."""

    def gathered(self) -> Keys:
        """Return one tensor (batch, kv_heads, slots, width); without a copy if `run` is set."""
        heads, _, block, width = self.blocks.shape
        if self.run is not None:
            start = (self.run + self.first) * block
            return self.blocks.flatten(1, 2)[None, :, start : start + self.slots]
        table = self.table[:, self.first :]
        taken = self.blocks.index_select(1, table.flatten())  # several times faster than indexing
        taken = taken.view(heads, len(table), table.shape[1] * block, width)
        return taken.transpose(0, 1)[:, :, : self.slots]


class Pool:
    """Reference counts and prefix labels of the cache blocks of all layers with the same `Reach`.

    A block can be labelled with the key of the prefix whose last tokens it holds. A labelled block
    keeps its keys and values after the last sequence has released it. The pool reuses such blocks
    only if it has no others, and the least recently used one first.

    Args:
        count: number of blocks, including the reserved blocks `EMPTY` and `SPILL`.
        reach: attention window of the layers whose keys and values the blocks hold; see `Reach`.

    Attributes:
        holders: for each block, the number of sequences that use it.
    """

    def __init__(self, count: int, reach: Reach) -> None:
        self.count = count
        self.reach = reach
        self._used_before: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Release all blocks of the pool and delete all prefix labels."""
        self.holders = [0] * self.count
        self._unused = list(range(SPILL + 1, self.count))  # a heap, so that blocks are consecutive
        self._kept: OrderedDict[int, None] = OrderedDict()  # labelled, no holders, oldest first
        self._blocks: dict[bytes, int] = {}
        self._labels: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Number of blocks that can hold tokens: all except the two reserved blocks."""
        return self.count - SPILL - 1

    @property
    def available(self) -> int:
        """Number of blocks that no sequence uses."""
        return len(self._unused) + len(self._kept)

    def take(self) -> tuple[int, bool]:
        """Allocate a block; return its index, and True if the block has been used before."""
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
        """Count one more sequence that uses a block; return the block."""
        if block != EMPTY:
            self._kept.pop(block, None)
            self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Count one sequence less that uses a block. At zero, the block becomes available."""
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
        """Label a block with the key of the prefix whose last tokens it holds.

        Do nothing if the block already has a label, or another block has this label.
        """
        if block != EMPTY and block not in self._labels and prefix not in self._blocks:
            self._labels[block] = prefix
            self._blocks[prefix] = block

    def find(self, prefix: bytes) -> int | None:
        """The block labelled with this prefix key, or None."""
        return self._blocks.get(prefix)


@dataclass(eq=False)
class CachedSequence:
    """The part of a sequence that is in a cache.

    Attributes:
        length: number of tokens in the cache.
        tables: for each `Reach`, the block table: indices of the sequence's blocks in order, with
            `EMPTY` for each released block.
        changes: counter of changes to the tables; a `PagedView` reads it to detect changes.
    """

    length: int = 0
    tables: dict[Reach, list[int]] = field(default_factory=dict)
    changes: int = 0


def check_sizes(*, slack: int, **sizes: int) -> None:
    """Raise a WorkhorseError if a size of a cache is not a whole number in range."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise WorkhorseError(
                f"{name}={shown(size)} is not a whole number above 0; give 1 or more"
            )
    if type(slack) is not int or slack < 0:
        raise WorkhorseError(f"slack={shown(slack)} is not a whole number; give 0 or more")


class PagedCache:
    """Keys and values of many sequences; created by `Decoder.new_paged_cache`.

    Args:
        tokens: maximum number of tokens of all sequences together.
        sequences: maximum number of sequences that hold tokens at a time.
        device: device of the tensors.
        context: maximum number of tokens of one sequence. An attention window of at least this
            width never releases blocks.
        slack: number of a sequence's newest tokens that `truncate` can always remove.

    Attributes:
        stores: the `Store` objects of all layers, in the order in which `Block.cache_stores`
            returned them.
        pools: the block pool of each `Reach`.
    """

    def __init__(
        self, tokens: int, sequences: int, device: torch.device, context: int, slack: int = 0
    ) -> None:
        check_sizes(tokens=tokens, sequences=sequences, slack=slack)
        self.tokens = tokens
        self.sequences = sequences
        self.device = device
        self.context = context
        self.slack = slack
        self.stores: list[Store] = []
        self.pools: dict[Reach, Pool] = {}

    def layer(self, reach: Reach, *, in_blocks: bool = False) -> "Store":
        """Create the block storage of a layer; for the arguments see `Layers.layer`."""
        return Store(self.pool(reach), in_blocks)

    def pool(self, reach: Reach) -> Pool:
        """The block pool shared by all layers with this `Reach`; created if necessary."""
        if reach is not None and reach >= self.context:
            reach = None
        if reach not in self.pools:
            # The last block of a sequence is partly used.
            count = self._blocks_for(self.tokens, None) + self.sequences
            if reach is not None:  # twice what running sequences need, to keep cached prefixes
                count = min(count, 2 * self.sequences * self._blocks_for(self.tokens, reach))
            try:
                self.pools[reach] = Pool(count + SPILL + 1, reach)
            except (MemoryError, OverflowError):
                raise WorkhorseError(
                    f"a cache of {self.tokens} tokens does not fit into memory; make it smaller"
                ) from None
        return self.pools[reach]

    def new_sequence(self) -> CachedSequence:
        """Create an empty sequence."""
        return CachedSequence(0, {reach: [] for reach in self.pools})

    def holds(self, *tokens: int) -> bool:
        """True if sequences with these lengths fit into the empty cache together."""
        return all(
            sum(self._blocks_for(count, reach) for count in tokens) <= pool.capacity
            for reach, pool in self.pools.items()
        )

    def has_blocks(self, needs: Sequence[int]) -> bool:
        """True if each pool has the needed number of available blocks; see `needs`."""
        pools = self.pools.values()
        return all(need <= pool.available for need, pool in zip(needs, pools, strict=True))

    def needs(self, sequence: CachedSequence, count: int) -> list[int]:
        """For each pool, the number of blocks that `extend` would allocate for `count` tokens."""
        end = sequence.length + count
        needs: list[int] = []
        for reach, table in sequence.tables.items():
            new = -(-end // BLOCK) - max(len(table), self.oldest(end, reach))
            needs.append(max(new, 0) + self._must_copy(sequence, reach))
        return needs

    def has_room(self, sequence: CachedSequence, count: int) -> bool:
        """True if `extend` can allocate blocks for `count` more tokens of a sequence."""
        return self._is_extended(sequence, count) or self.has_blocks(self.needs(sequence, count))

    def extend(self, sequence: CachedSequence, count: int) -> None:
        """Allocate unshared blocks for `count` more tokens of a sequence.

        Raises:
            WorkhorseError: too few blocks are available. The cache is then unchanged.
        """
        if self._is_extended(sequence, count):
            return
        if not self.has_blocks(self.needs(sequence, count)):
            raise WorkhorseError(
                f"a cache of {self.tokens} tokens has no room for {count} more; clear a sequence, "
                "or make the cache with more tokens"
            )
        end = sequence.length + count
        for reach, table in sequence.tables.items():
            pool = self.pools[reach]
            visible = self.oldest(sequence.length, reach)
            for index in range(min(visible, len(table)) - 1, -1, -1):
                if table[index] == EMPTY:
                    break
                pool.release(table[index])
                table[index] = EMPTY
                sequence.changes += 1
            if self._must_copy(sequence, reach):
                table[-1] = self._copy(pool, table[-1])
                sequence.changes += 1
            oldest = self.oldest(end, reach)
            for index in range(len(table), -(-end // BLOCK)):
                table.append(EMPTY if index < oldest else self._take(pool))
                sequence.changes += 1

    def _is_extended(self, sequence: CachedSequence, count: int) -> bool:
        """True if a sequence has unshared blocks for `count` more tokens."""
        return not any(
            len(table) * BLOCK < sequence.length + count or self._must_copy(sequence, reach)
            for reach, table in sequence.tables.items()
        )

    def _must_copy(self, sequence: CachedSequence, reach: Reach) -> bool:
        """True if the next token belongs in a block that other sequences also hold."""
        last = sequence.tables[reach][-1:]
        return bool(sequence.length % BLOCK) and self.pools[reach].holders[last[0]] > 1

    def adopt(
        self, sequence: CachedSequence, length: int, tables: Mapping[Reach, Sequence[int]]
    ) -> None:
        """Replace a sequence's contents by the first `length` tokens of the given block tables.

        The blocks are shared with the sequence that the tables come from, not copied.
        """
        self.clear(sequence)
        for reach, table in tables.items():
            oldest = self.oldest(length, reach)
            held = [EMPTY] * oldest + list(table[oldest : -(-length // BLOCK)])
            sequence.tables[reach] = [self.pools[reach].share(block) for block in held]
        sequence.length = length
        sequence.changes += 1

    def label(self, sequence: CachedSequence, prefixes: Sequence[bytes]) -> None:
        """Keep a sequence's first full blocks as prefixes that other sequences can share.

        Args:
            sequence: the sequence that holds the blocks.
            prefixes: one key per block, which identifies its tokens and all tokens before them.
        """
        for reach, table in sequence.tables.items():
            for block, prefix in zip(table, prefixes, strict=False):
                self.pools[reach].label(block, prefix)

    def adopt_prefix(
        self, sequence: CachedSequence, prefixes: Sequence[bytes], multiple: int = 1
    ) -> None:
        """Let an empty sequence share the cached blocks of its longest prefix that is still held.

        Args:
            sequence: the empty sequence.
            prefixes: one key per full block of its tokens; see `label`.
            multiple: the number of shared blocks is a multiple of this.
        """
        found = {
            reach: [pool.find(prefix) for prefix in prefixes] for reach, pool in self.pools.items()
        }
        complete = dict.fromkeys(found, 0)  # length of the run of blocks that ends here
        best = 0
        for n in range(1, len(prefixes) + 1):
            for reach, blocks in found.items():
                complete[reach] = 0 if blocks[n - 1] is None else complete[reach] + 1
            seen = {reach: n - self._first_seen(n * BLOCK, reach) for reach in found}
            if n % multiple == 0 and all(complete[reach] >= seen[reach] for reach in found):
                best = n
        if best:
            tables = {
                reach: [EMPTY if block is None else block for block in blocks[:best]]
                for reach, blocks in found.items()
            }
            self.adopt(sequence, best * BLOCK, tables)

    def clear(self, sequence: CachedSequence) -> None:
        """Release all blocks of a sequence."""
        self.truncate(sequence, 0)

    def reset(self) -> None:
        """Release all blocks and delete all prefix labels. Existing sequences become invalid."""
        for pool in self.pools.values():
            pool.reset()

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keep only the first `length` tokens of a sequence.

        Raises:
            WorkhorseError: the length is invalid, or the shorter sequence would see blocks that
                were released because they had left the attention window.
        """
        self.check_can_truncate(sequence, length)
        for reach, table in sequence.tables.items():
            while len(table) > -(-length // BLOCK):
                self.pools[reach].release(table.pop())
                sequence.changes += 1
        sequence.length = length

    def check_can_truncate(self, sequence: CachedSequence, length: int) -> None:
        """Raise a WorkhorseError if `truncate` cannot shorten a sequence to this length."""
        if type(length) is not int or length < 0:
            raise WorkhorseError(f"length={length!r} is not a whole number; give 0 or more")
        for reach, table in sequence.tables.items():
            if EMPTY in table[self._first_seen(length, reach) : -(-length // BLOCK)]:
                raise WorkhorseError(
                    f"cannot truncate to {length} tokens: a window has released tokens visible "
                    "there; make the cache with more slack"
                )

    def oldest(self, length: int, reach: Reach) -> int:
        """Index of the first block that a sequence of `length` tokens must keep.

        It must keep the blocks that it would see after up to `slack` tokens are removed again.
        """
        return 0 if reach is None else max(0, length - reach - self.slack) // BLOCK

    def _first_seen(self, length: int, reach: Reach) -> int:
        """Index of the first block that the next token of a sequence of `length` tokens sees."""
        return 0 if reach is None else max(0, length + 1 - reach) // BLOCK

    def _blocks_for(self, tokens: int, reach: Reach) -> int:
        """The maximum number of blocks that a sequence of `tokens` tokens holds at a time."""
        whole = -(-tokens // BLOCK)
        # Blocks inside the window before a long pass, and blocks inside it after the pass.
        return whole if reach is None else min(whole, 2 * -(-(reach + self.slack) // BLOCK) + 3)

    def _take(self, pool: Pool) -> int:
        block, again = pool.take()
        if again:  # old values may be NaN, and 0 times NaN in a masked sum is NaN
            for tensor in self._stored(pool):
                tensor[:, block].zero_()
        return block

    def _copy(self, pool: Pool, block: int) -> int:
        """Copy a shared block for one of its sequences; return the index of the copy."""
        copy = self._take(pool)
        for tensor in self._stored(pool):
            tensor[:, copy] = tensor[:, block]
        pool.release(block)
        return copy

    def _stored(self, pool: Pool) -> list[Tensor]:
        stores = (store for store in self.stores if store.pool is pool)
        return [tensor for store in stores for tensor in (store.k, store.v) if tensor is not None]


class Store:
    """The cache blocks of one layer: a tensor of keys and a tensor of values.

    The tensors are allocated on first use, in the dtype that attention computes in.

    Args:
        pool: pool that allocates the blocks.
        in_blocks: True if the layer's attention kernel reads `InBlocks`; False if it needs one
            contiguous tensor.
    """

    def __init__(self, pool: Pool, in_blocks: bool) -> None:
        self.pool = pool
        self.in_blocks = in_blocks
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def tensors(self, k: NewKeys, v: NewValues) -> tuple[Tensor, Tensor]:
        """The tensors of keys and of values, each (kv_heads, blocks, `BLOCK`, width)."""
        if self.k is None or self.v is None:
            self.k, self.v = self._allocate(k), self._allocate(v)
        return self.k, self.v

    def _allocate(self, new: Tensor) -> Tensor:
        shape = new.shape[1], self.pool.count, BLOCK, new.shape[3]
        try:
            with torch.inference_mode(False):  # so they can be written outside of that mode
                return torch.zeros(shape, dtype=new.dtype, device=new.device)
        except RuntimeError:
            raise WorkhorseError(
                f"a cache of {self.pool.count * BLOCK} tokens does not fit into memory; "
                "make it smaller"
            ) from None
