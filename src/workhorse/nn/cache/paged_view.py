"""Views of the sequences of a `PagedCache` for a forward pass.

A `PagedView` is a batch: each sequence gets the same number of new tokens. A `PackedView` combines
several batches in one pass, with all their tokens in one row. Linear layers then read their weights
only once. Attention and convolutions compute each batch separately.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.nn.attention.masks import Placement
from workhorse.nn.cache.paged import (
    BLOCK,
    EMPTY,
    SPILL,
    CachedSequence,
    InBlocks,
    PagedCache,
    Reach,
    Store,
)
from workhorse.nn.cache.view import CacheEntry, CacheView
from workhorse.nn.shapes import NewKeys, NewValues, Positions


class Pages:
    """Block tables, positions and write slots of a batch in a pass, for layers with one `Reach`.

    All layers with the same attention window, or all layers without one, share this object.

    Attributes:
        place: positions of queries and keys.
        table: block table of each sequence, one per row.
        first: see `InBlocks`.
        slots: see `InBlocks`; 0 if the cache is empty, so that only new keys are visible.
        appended: True if layers attend to the stored keys concatenated with the new ones; False if
            they store the new keys first and then read all keys from the cache. It is True for more
            than `slack + 1` new tokens in layers with a window, since blocks that the first new
            token sees may be released for the last one.
        writes: index of the block, and of the slot in it, for each new token.
    """

    def __init__(self, cache: PagedCache, reach: Reach) -> None:
        self._cache = cache
        self._reach = reach
        self.table = torch.empty(0)

    def set_table(self, sequences: Sequence[CachedSequence]) -> None:
        tables = [sequence.tables[self._reach] for sequence in sequences]
        widest = max(2, *map(len, tables))  # a compiler would specialise on a width of 1
        rows = [table + [EMPTY] * (widest - len(table)) for table in tables]
        self.table = torch.tensor(rows, device=self._cache.device)
        self._run = None
        if len(tables) == 1 and tables[0]:
            start, end = tables[0][0], tables[0][0] + len(tables[0])
            self._run = start if tables[0] == list(range(start, end)) else None

    def begin(
        self,
        positions: Positions,
        lengths: Tensor,
        longest: int,
        before: Sequence[int],
        *,
        uniform: bool,
    ) -> None:
        """Compute the write slots and the visible keys of a pass from its positions.

        Args:
            positions: (batch, seq), -1 for padding.
            lengths: row lengths including the new tokens, (batch,).
            longest: the largest of `lengths`.
            before: row lengths before the new tokens.
            uniform: True if all rows have the same length, without padding.
        """
        seq, cache = positions.shape[1], self._cache
        blocks = self.table.gather(1, (positions // BLOCK).clamp(min=0).expand(len(before), seq))
        self.writes = (
            torch.where((positions < 0) | (blocks == EMPTY), SPILL, blocks),
            (positions % BLOCK).expand_as(blocks),
        )
        self.appended = self._reach is not None and seq > cache.slack + 1
        if not any(before):
            self.first = self.slots = 0
            self.place = Placement(positions, positions, aligned=uniform)
            return
        self.first = min(cache.oldest(length, self._reach) for length in before)
        filled = max(before) if self.appended else longest
        start = self.first * BLOCK
        self.slots = max(0, filled - start)
        keys = torch.arange(start, start + self.slots, device=positions.device)[None]
        shown = uniform and not self.appended
        if not shown:
            held = lengths - (positions >= 0).sum(dim=1) if self.appended else lengths
            keys = torch.where(keys < held[:, None], keys, -1)
        if self.appended:
            keys = torch.cat((keys, positions.expand(len(keys), -1)), dim=1)
        self.place = Placement(
            positions, keys, last=shown and seq == 1, in_blocks=not self.appended
        )

    def of(self, stored: Tensor) -> InBlocks:
        """The visible keys or values of a layer, as `InBlocks` with these block tables."""
        return InBlocks(stored, self.table, self.first, self.slots, self._run)


class PagedEntry(CacheEntry):
    """The cached keys and values of one layer, for the sequences of a `PagedView`."""

    def __init__(self, store: Store, pages: Pages) -> None:
        self._store = store
        self._pages = pages

    def update(self, k: NewKeys, v: NewValues) -> tuple[Tensor | InBlocks, Tensor | InBlocks]:
        stored = self._store.tensors(k, v)
        return self._update(stored[0], k), self._update(stored[1], v)

    def _update(self, stored: Tensor, new: Tensor) -> Tensor | InBlocks:
        pages = self._pages
        blocks = pages.of(stored)
        visible: Tensor | InBlocks = new
        if pages.slots and pages.appended:
            visible = torch.cat((blocks.gathered(), new), dim=2)
        block, slot = pages.writes
        stored[:, block, slot] = new.transpose(0, 1)
        if pages.slots and not pages.appended:
            visible = blocks if self._store.in_blocks else blocks.gathered()
        return visible


class PagedView(CacheView):
    """A batch of sequences of a `PagedCache`, one per row.

    The sequences and the cache may change between passes: `reserve` and `begin` read their current
    state.

    Args:
        cache: the cache.
        sequences: its sequences.
        capacity: maximum number of tokens per row; None: limited only by the blocks of the cache.
    """

    def __init__(
        self,
        cache: PagedCache,
        sequences: Sequence[CachedSequence],
        capacity: int | None = None,
    ) -> None:
        self.cache = cache
        self.capacity = capacity
        self.sequences = list(sequences)
        if not self.sequences or len(set(self.sequences)) < len(self.sequences):
            raise WorkhorseError(
                "a view needs at least one sequence and no duplicates; give each sequence once"
            )
        self.slack = cache.slack
        self.pages = {reach: Pages(cache, reach) for reach in cache.pools}
        self.entries = [PagedEntry(store, self.pages[store.pool.reach]) for store in cache.stores]
        self._changes: list[int] = []
        self._lengths: list[int] = []
        self._follow()

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        rows, seq = len(self.sequences), positions.shape[1]
        counts = [seq] * rows
        if not uniform:
            counts = [int(count) for count in (positions >= 0).sum(dim=1).expand(rows)]
        self.reserve(counts)
        before, alike = self._lengths, uniform and self.uniform
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.length += count
        self._follow()
        for pages in self.pages.values():
            pages.begin(positions, self.lengths, self.length, before, uniform=alike)

    def reserve(self, counts: Sequence[int]) -> None:
        """Allocate blocks for `counts[r]` more tokens of each row r.

        Raises:
            WorkhorseError: a row would have more tokens than `capacity`, or the cache has too few
                blocks.
        """
        for sequence, count in zip(self.sequences, counts, strict=True):
            if self.capacity is not None and sequence.length + count > self.capacity:
                raise WorkhorseError(
                    f"{sequence.length} + {count} tokens do not fit a cache of {self.capacity}; "
                    "make one with more capacity"
                )
        for sequence, count in zip(self.sequences, counts, strict=True):
            self.cache.extend(sequence, count)
        self._follow()

    def advance(self, seq: int) -> None:
        """Add `seq` to the Python-side length of each sequence, after a step stored these tokens.

        The tensor `lengths` is not changed: the step has already updated it.
        """
        for sequence in self.sequences:
            sequence.length += seq
        self._lengths = [length + seq for length in self._lengths]
        self.length += seq

    def place(self, reach: Reach) -> Placement:
        return self.pages[reach if reach in self.pages else None].place

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[r]` tokens of each row r.

        Raises:
            WorkhorseError: a length is out of range, or see `PagedCache.truncate`. The cache is
                then unchanged.
        """
        held = [sequence.length for sequence in self.sequences]
        fit = isinstance(lengths, list | tuple) and len(lengths) == len(held)
        if not fit or not all(
            type(length) is int and 0 <= length <= most
            for length, most in zip(lengths, held, strict=True)
        ):
            raise WorkhorseError(
                f"lengths={shown(lengths)} are out of range for rows of {held} tokens; "
                "give each row a whole number from 0 to its length"
            )
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.cache.check_can_truncate(sequence, length)
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.cache.truncate(sequence, length)
        self._follow()

    def _follow(self) -> None:
        """Update the block tables and lengths of the view if its sequences have changed."""
        changes = [sequence.changes for sequence in self.sequences]
        if changes != self._changes:
            self._changes = changes
            for pages in self.pages.values():
                pages.set_table(self.sequences)
        lengths = [sequence.length for sequence in self.sequences]
        if lengths != self._lengths:
            self._lengths = lengths
            self.lengths = torch.tensor(lengths, device=self.cache.device)
            self.length, self.uniform = max(lengths), len(set(lengths)) == 1


class PackedEntry(CacheEntry):
    """The cache entries of one layer in a packed pass: one entry per batch."""

    def __init__(self, parts: Sequence[CacheEntry]) -> None:
        self.parts = parts

    def update(self, k: NewKeys, v: NewValues) -> NoReturn:
        raise AssertionError("each part of a packed pass stores its own keys and values")


class PackedView(CacheView):
    """Several batches packed into one row of tokens: all rows of the first batch, then the next.

    Args:
        parts: the batches, each with its number of new tokens per sequence.
    """

    slack = 0
    uniform = False
    parts: Sequence[tuple[PagedView, int]]

    def __init__(self, parts: Sequence[tuple[PagedView, int]]) -> None:
        self.parts = parts
        self.lengths = parts[0][0].lengths.new_zeros(1)
        self.length = max(view.length for view, _ in parts)
        self.entries = [
            PackedEntry(entries)
            for entries in zip(*(view.entries for view, _ in parts), strict=True)
        ]

    def next_positions(self, seq: int) -> Positions:
        del seq
        return torch.cat([view.next_positions(new).flatten() for view, new in self.parts])[None]

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        """Do nothing: the `Context` of each batch calls `begin` of the batch's own view."""

    def place(self, reach: Reach) -> NoReturn:
        raise AssertionError("each part of a packed pass has its own placement")
