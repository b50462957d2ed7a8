"""A paged cache: texts are opened, forked and closed at any time, and share common prefixes.

Keys and values are stored in blocks of `BLOCK` tokens, and a text has a block table
(PagedAttention, 2309.06180). Several texts may share a block; it is copied on write. Layers of the
same reach share their tables. A text releases blocks that have fallen out of a window.

`PagedCache.open` reserves room for a text; a `PagedView` is a batch of texts in a forward pass.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.nn.cache.blocks import BLOCK, EMPTY, SPILL, CachedText, Pool, Reach
from workhorse.nn.shapes import NewKeys, NewValues


class PagedCache:
    """Keys and values of many texts; made by `Decoder.new_paged_cache`.

    Args:
        tokens: the most tokens that all texts together may hold.
        texts: the most texts that may be open at a time.
        device: of the tensors.
        context: the most tokens of one text; a window at least as wide never releases blocks.
        slack: how many of a text's newest tokens can always be taken back.

    Attributes:
        stores: of all layers, in the order of their `Block.rooms`.
        reclaim: called when all blocks are held, to release some that no open text needs; returns
            whether it dropped anything.
    """

    def __init__(
        self, tokens: int, texts: int, device: torch.device, context: int, slack: int = 0
    ) -> None:
        for name, size in (("tokens", tokens), ("texts", texts)):
            if type(size) is not int or size < 1:
                raise WorkhorseError(
                    f"{name}={size!r} is not a whole number above 0; give 1 or more"
                )
        if type(slack) is not int or slack < 0:
            raise WorkhorseError(f"slack={slack!r} is not a number of tokens; give 0 or more")
        self.tokens = tokens
        self.texts = texts
        self.device = device
        self.context = context
        self.slack = slack
        self.stores: list[Store] = []
        self.pools: dict[Reach, Pool] = {}
        self.reclaim: Callable[[Reach], bool] = lambda _: False

    def layer(self, reach: Reach, *, in_blocks: bool = False) -> "Store":
        """A store for a layer of this reach, whose kernel reads `InBlocks` or gathered tensors."""
        if reach is not None and reach >= self.context:
            reach = None
        if reach not in self.pools:
            count = self._blocks_for(self.tokens, None) + self.texts  # last blocks are partly used
            if reach is not None:  # twice as many, to remember ended texts
                count = min(count, 2 * self.texts * self._blocks_for(self.tokens, reach))
            try:
                self.pools[reach] = Pool(count + SPILL + 1, reach)
            except (MemoryError, OverflowError):
                raise WorkhorseError(
                    f"a cache of {self.tokens} tokens does not fit into memory; make it smaller"
                ) from None
        return Store(self.pools[reach], in_blocks)

    def fits(self, *most: int) -> bool:
        """Whether there is room for more texts, text i of at most `most[i]` tokens."""
        return all(
            pool.reserved + sum(self._blocks_for(tokens, reach) for tokens in most) <= pool.room
            for reach, pool in self.pools.items()
        )

    def holds(self, *most: int) -> bool:
        """Whether there would be room for these texts in an empty cache."""
        return all(
            sum(self._blocks_for(tokens, reach) for tokens in most) <= pool.room
            for reach, pool in self.pools.items()
        )

    def open(self, most: int) -> CachedText:
        """Open a text, with room reserved for up to `most` tokens.

        Raises:
            WorkhorseError: there is no room.
        """
        if type(most) is not int or most < 1:
            raise WorkhorseError(f"most={most!r} is not a number of tokens; give 1 or more")
        if not self.fits(most):
            raise WorkhorseError(
                f"a text of {most} tokens does not fit a cache of {self.tokens} with the others "
                "open; close one, or make the cache with more tokens"
            )
        for reach, pool in self.pools.items():
            pool.reserved += self._blocks_for(most, reach)
        return CachedText(most, 0, {reach: [] for reach in self.pools})

    def close(self, text: CachedText) -> None:
        """Close a text, if it is open. Blocks that it shares with others stay."""
        if text.is_closed:
            return
        for reach, pool in self.pools.items():
            pool.reserved -= self._blocks_for(text.most, reach)
            for block in text.tables[reach]:
                pool.release(block)
        text.length, text.tables = 0, {}

    def adopt(self, text: CachedText, length: int, tables: Mapping[Reach, Sequence[int]]) -> None:
        """Replace the contents of a text by the first `length` tokens of these tables, shared."""
        self.clear(text)
        for reach, table in tables.items():
            oldest = self.oldest(length, reach)
            held = [EMPTY] * oldest + list(table[oldest : -(-length // BLOCK)])
            text.tables[reach] = [self.pools[reach].share(block) for block in held]
        text.length = length

    def clear(self, text: CachedText) -> None:
        """Empty a text, which keeps its reserved room."""
        self.truncate(text, 0)

    def truncate(self, text: CachedText, length: int) -> None:
        """Keep the first `length` tokens of a text.

        Raises:
            WorkhorseError: the length is invalid, or a window has released tokens that would be
                visible again.
        """
        self.check_shows(text, length)
        for reach, table in text.tables.items():
            while len(table) > -(-length // BLOCK):
                self.pools[reach].release(table.pop())
        text.length = length

    def check_shows(self, text: CachedText, length: int) -> None:
        """Refuse a length that `truncate` cannot go back to."""
        if type(length) is not int or length < 0:
            raise WorkhorseError(f"length={length!r} is not a number of tokens; give 0 or more")
        for reach, table in text.tables.items():
            if EMPTY in table[self.first_seen(length, reach) : -(-length // BLOCK)]:
                raise WorkhorseError(
                    f"a window has moved past what it saw after {length} tokens; read the text "
                    "again, or make the cache with more slack"
                )

    def extend(self, text: CachedText, count: int) -> bool:
        """Give a text unshared blocks for `count` more tokens; returns whether a table changed."""
        changed, end = False, text.length + count
        for reach, table in text.tables.items():
            pool = self.pools[reach]
            before = self.oldest(text.length, reach)  # earlier blocks are not visible
            for number in range(min(before, len(table)) - 1, -1, -1):
                if table[number] == EMPTY:
                    break
                pool.release(table[number])
                table[number], changed = EMPTY, True
            if text.length % BLOCK and pool.holders[table[-1]] > 1:
                table[-1], changed = self._copy(reach, table[-1]), True
            oldest = self.oldest(end, reach)
            for number in range(len(table), -(-end // BLOCK)):
                table.append(EMPTY if number < oldest else self._take(reach))
                changed = True
        return changed

    def first_seen(self, length: int, reach: Reach) -> int:
        """The first block that the token after `length` tokens sees."""
        return 0 if reach is None else max(0, length + 1 - reach) // BLOCK

    def oldest(self, length: int, reach: Reach) -> int:
        """The first block that a text of `length` tokens may see, even with `slack` taken back."""
        return 0 if reach is None else max(0, length - reach - self.slack) // BLOCK

    def _blocks_for(self, tokens: int, reach: Reach) -> int:
        """The most blocks that a text of `tokens` tokens needs at a time."""
        whole = -(-tokens // BLOCK)
        # Those that a window shows before a long pass, and those that it shows after.
        return whole if reach is None else min(whole, 2 * -(-(reach + self.slack) // BLOCK) + 3)

    def _take(self, reach: Reach) -> int:
        pool = self.pools[reach]
        while pool.is_full and self.reclaim(reach):
            pass
        if pool.is_full:
            raise WorkhorseError(
                f"every block of a cache of {self.tokens} tokens is in use; close a text"
            )
        block, again = pool.take()
        if again:  # old values must not enter a sum, not even times zero: they may be NaN
            for tensor in self._stored(pool):
                tensor[:, block].zero_()
        return block

    def _copy(self, reach: Reach, block: int) -> int:
        """An unshared copy of a shared block."""
        pool, copy = self.pools[reach], self._take(reach)
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
        pool: counts the holders of each block.
        in_blocks: whether the layer's kernel reads `InBlocks`.
    """

    def __init__(self, pool: Pool, in_blocks: bool) -> None:
        self.pool = pool
        self.in_blocks = in_blocks
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def tensors(self, k: NewKeys, v: NewValues) -> tuple[Tensor, Tensor]:
        """The blocks of keys and of values, each (kv_heads, blocks, block, width)."""
        if self.k is None or self.v is None:
            self.k, self.v = self._room_for(k), self._room_for(v)
        return self.k, self.v

    def _room_for(self, new: Tensor) -> Tensor:
        shape = new.shape[1], self.pool.count, BLOCK, new.shape[3]
        try:
            with torch.inference_mode(False):  # they may be written outside of that mode
                return torch.zeros(shape, dtype=new.dtype, device=new.device)
        except RuntimeError:
            raise WorkhorseError(
                f"a cache of {self.pool.count * BLOCK} tokens does not fit into memory; "
                "make it smaller"
            ) from None
