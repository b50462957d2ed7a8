"""A paged cache: sequences are added, forked and removed at any time, and share prefixes.

Keys and values are stored in blocks of `BLOCK` tokens, and a sequence has a block table
(PagedAttention, 2309.06180). Several sequences may share a block; it is copied on write. Layers of
the same reach share their tables. A sequence releases blocks that have left its window. Blocks are
allocated when tokens need them; nothing is reserved.

A `PagedView` is a batch of sequences in a forward pass.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.nn.shapes import Keys, NewKeys, NewValues

BLOCK = 32
"""Tokens in a block."""
EMPTY, SPILL = 0, 1
"""Two reserved blocks of every pool. `EMPTY` is never written; it fills table entries without a
block. `SPILL` receives writes that are discarded; no table contains it."""
Reach = int | None
"""Number of latest positions that a query sees, including its own; None: all positions."""


class InBlocks(NamedTuple):
    """Keys or values in their blocks, for kernels that read block tables."""

    blocks: Float[Tensor, "kv_heads blocks block width"]
    table: Int[Tensor, "batch blocks_of_a_sequence"]
    first: int
    """Number of blocks at the start of the tables that no query sees."""
    slots: int
    """Number of slots after those blocks that a sequence may fill."""
    run: int | None = None
    """The first block of the only sequence, if its blocks are consecutive; otherwise None."""

    def gathered(self) -> Keys:
        """Gather the blocks into one tensor (batch, kv_heads, slots, width); a view if possible."""
        heads, _, block, width = self.blocks.shape
        if self.run is not None:
            start = (self.run + self.first) * block
            return self.blocks.flatten(1, 2)[None, :, start : start + self.slots]
        table = self.table[:, self.first :]
        taken = self.blocks.index_select(1, table.flatten())  # several times faster than indexing
        taken = taken.view(heads, len(table), table.shape[1] * block, width)
        return taken.transpose(0, 1)[:, :, : self.slots]


class Pool:
    """The blocks of all layers with the same reach, with reference counts.

    A block can be labelled with the prefix whose last tokens it holds. A labelled block keeps its
    keys and values after its last holder has released it. The pool reuses such blocks only if there
    are no others, the least recently used one first.

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
        """Release all blocks and delete all labels."""
        self.holders = [0] * self.count
        self._unused = list(range(SPILL + 1, self.count))  # a heap, so that blocks are consecutive
        self._kept: OrderedDict[int, None] = OrderedDict()  # labelled, no holders, oldest first
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
        """Take an available block; return it, and True if it has been used before."""
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
        """Add a holder to a block."""
        if block != EMPTY:
            self._kept.pop(block, None)
            self.holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Remove a holder from a block. A block without holders is available."""
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
        """Label a block with the prefix that it ends, unless either already has a label."""
        if block != EMPTY and block not in self._labels and prefix not in self._blocks:
            self._labels[block] = prefix
            self._blocks[prefix] = block

    def find(self, prefix: bytes) -> int | None:
        """The block that ends a prefix, or None."""
        return self._blocks.get(prefix)


@dataclass(eq=False)
class CachedSequence:
    """The part of a sequence that is in a cache.

    Attributes:
        length: number of tokens in the cache.
        tables: its blocks in order, for each reach; `EMPTY` where a block was released.
        changes: number of changes to the tables, by which a `PagedView` detects them.
    """

    length: int = 0
    tables: dict[Reach, list[int]] = field(default_factory=dict)
    changes: int = 0


class PagedCache:
    """Keys and values of many sequences; created by `Decoder.new_paged_cache`.

    Args:
        tokens: maximum number of tokens of all sequences together.
        sequences: maximum number of sequences that hold tokens at a time.
        device: device of the tensors.
        context: maximum number of tokens of one sequence. A window at least as wide never releases
            blocks.
        slack: number of a sequence's newest tokens that `truncate` can always remove.

    Attributes:
        stores: stores of all layers, in the order of their `Block.cache_stores`.
        pools: block pools, one for each reach.
    """

    def __init__(
        self, tokens: int, sequences: int, device: torch.device, context: int, slack: int = 0
    ) -> None:
        for name, size in (("tokens", tokens), ("sequences", sequences)):
            if type(size) is not int or size < 1:
                raise WorkhorseError(
                    f"{name}={size!r} is not a whole number above 0; give 1 or more"
                )
        if type(slack) is not int or slack < 0:
            raise WorkhorseError(f"slack={slack!r} is not a whole number; give 0 or more")
        self.tokens = tokens
        self.sequences = sequences
        self.device = device
        self.context = context
        self.slack = slack
        self.stores: list[Store] = []
        self.pools: dict[Reach, Pool] = {}

    def layer(self, reach: Reach, *, in_blocks: bool = False) -> "Store":
        """Create a store for a layer with this reach; see `Layers.layer`."""
        return Store(self.pool(reach), in_blocks)

    def pool(self, reach: Reach) -> Pool:
        """The pool of the layers with this reach; created if necessary."""
        if reach is not None and reach >= self.context:
            reach = None
        if reach not in self.pools:
            # The last block of a sequence is partly used.
            count = self._blocks_for(self.tokens, None) + self.sequences
            if reach is not None:  # twice the need of all sequences, to keep prefixes of others
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
        """True if each pool has the needed number of available blocks."""
        pools = self.pools.values()
        return all(need <= pool.available for need, pool in zip(needs, pools, strict=True))

    def needs(self, sequence: CachedSequence, count: int) -> list[int]:
        """Number of blocks of each pool that `extend` would take for `count` more tokens."""
        end = sequence.length + count
        needs: list[int] = []
        for reach, table in sequence.tables.items():
            new = -(-end // BLOCK) - max(len(table), self.oldest(end, reach))
            needs.append(max(new, 0) + self._must_copy(sequence, reach))
        return needs

    def has_room(self, sequence: CachedSequence, count: int) -> bool:
        """True if a sequence can be extended by `count` tokens."""
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
        """Replace a sequence by the first `length` tokens of these tables; share their blocks."""
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
        """Give an empty sequence the longest of its prefixes that the cache still holds.

        Args:
            sequence: the empty sequence.
            prefixes: keys of its full blocks; see `label`.
            multiple: the number of adopted blocks is a multiple of this.
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
        """Release all blocks and delete all prefixes. Existing sequences become invalid."""
        for pool in self.pools.values():
            pool.reset()

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence.

        Raises:
            WorkhorseError: the length is invalid, or a window has released tokens that would be
                visible again.
        """
        self.check_can_truncate(sequence, length)
        for reach, table in sequence.tables.items():
            while len(table) > -(-length // BLOCK):
                self.pools[reach].release(table.pop())
                sequence.changes += 1
        sequence.length = length

    def check_can_truncate(self, sequence: CachedSequence, length: int) -> None:
        """Raise an error for a length that `truncate` cannot restore."""
        if type(length) is not int or length < 0:
            raise WorkhorseError(f"length={length!r} is not a whole number; give 0 or more")
        for reach, table in sequence.tables.items():
            if EMPTY in table[self._first_seen(length, reach) : -(-length // BLOCK)]:
                raise WorkhorseError(
                    f"cannot truncate to {length} tokens: a window has released tokens visible "
                    "there; make the cache with more slack"
                )

    def oldest(self, length: int, reach: Reach) -> int:
        """The first block that a sequence may see after `length` tokens minus up to `slack`."""
        return 0 if reach is None else max(0, length - reach - self.slack) // BLOCK

    def _first_seen(self, length: int, reach: Reach) -> int:
        """The first block that the token after `length` tokens sees."""
        return 0 if reach is None else max(0, length + 1 - reach) // BLOCK

    def _blocks_for(self, tokens: int, reach: Reach) -> int:
        """The maximum number of blocks that a sequence of `tokens` tokens holds at a time."""
        whole = -(-tokens // BLOCK)
        # The blocks that a window shows before a long pass, and those that it shows after it.
        return whole if reach is None else min(whole, 2 * -(-(reach + self.slack) // BLOCK) + 3)

    def _take(self, pool: Pool) -> int:
        block, again = pool.take()
        if again:  # old values may be NaN, and 0 times NaN in a masked sum is NaN
            for tensor in self._stored(pool):
                tensor[:, block].zero_()
        return block

    def _copy(self, pool: Pool, block: int) -> int:
        """Replace a holder's shared block by an unshared copy."""
        copy = self._take(pool)
        for tensor in self._stored(pool):
            tensor[:, copy] = tensor[:, block]
        pool.release(block)
        return copy

    def _stored(self, pool: Pool) -> list[Tensor]:
        stores = (store for store in self.stores if store.pool is pool)
        return [tensor for store in stores for tensor in (store.k, store.v) if tensor is not None]


class Store:
    """The blocks of one layer.

    The tensors are allocated on first use, in the dtype that attention computes in.

    Args:
        pool: pool that counts the holders of each block.
        in_blocks: True if the layer's kernel reads `InBlocks`.
    """

    def __init__(self, pool: Pool, in_blocks: bool) -> None:
        self.pool = pool
        self.in_blocks = in_blocks
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def tensors(self, k: NewKeys, v: NewValues) -> tuple[Tensor, Tensor]:
        """The blocks of keys and of values, each (kv_heads, blocks, block, width)."""
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
