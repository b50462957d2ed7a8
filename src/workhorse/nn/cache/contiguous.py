"""Two KV caches: `Cache` with contiguous slots, and `FixedCache` for compiled steps.

In a `Cache`, position p is stored in slot `p % capacity`. Layers with equal capacity share one
`SlotPositions`, which stores the position in each slot of each row. Masks are computed from these
positions, so full, rolling and ragged caches need no special cases.

A `PagedView` counts tokens in Python ints, so a compiler would recompile for every token. A
`FixedCache` uses the view's tensors for one pass over at most `slack + 1` new tokens of each row.
All its state that changes is in tensors. The caller reserves blocks for the new tokens before the
pass (`PagedView.reserve`) and counts the tokens after it (`PagedView.advance`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.nn.attention.masks import Placement
from workhorse.nn.cache.paged import BLOCK, InBlocks, Reach
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheEntry, CacheView
from workhorse.nn.shapes import Keys, NewKeys, NewValues, Positions, Values


class SlotPositions:
    """The position stored in each cache slot of each row, shared by layers with equal capacity.

    Args:
        batch: number of rows.
        capacity: number of slots per row.
        rolling: True if new positions overwrite the slots of positions outside the window.
        device: device of the positions.

    Each row has one extra slot at the end. It receives keys that need not be kept: those of
    padding, and of tokens that would be overwritten within the same pass.
    """

    def __init__(self, batch: int, capacity: int, *, rolling: bool, device: torch.device) -> None:
        self.capacity = capacity
        self.rolling = rolling
        try:
            self.held = torch.full((batch, capacity + 1), -1, device=device)  # positions
        except (RuntimeError, TypeError):  # out of memory, or a size too large for PyTorch
            raise WorkhorseError(
                f"a cache of {batch} rows × {capacity} tokens does not fit into memory; make it "
                "smaller"
            ) from None
        self.used = 0  # slots in use in the longest row
        self.appended = False
        self.written = torch.empty((batch, 0), dtype=torch.int64, device=device)
        self.rows = torch.arange(batch, device=device)[:, None]
        self.place = Placement(self.held[:, :0], self.held[:, :0])

    def begin(self, positions: Positions, *, start: int, uniform: bool) -> None:
        """Register the positions of one forward pass, before the layers write their keys.

        Args:
            positions: positions of the new tokens, (batch, seq), -1 for padding.
            start: number of columns of all earlier passes.
            uniform: True if every row holds positions 0, 1, 2 … without padding.
        """
        seq = positions.shape[1]
        last = positions.amax(dim=1, keepdim=True)
        kept = (positions >= 0) & (positions > last - self.capacity)
        self.written = torch.where(kept, positions % self.capacity, self.capacity)
        # Several tokens cannot be stored in a rolling cache before they attend: the last would
        # overwrite keys that the first may still see. They attend to the stored keys concatenated
        # with the new ones.
        self.appended = self.rolling and seq > 1
        with_new = torch.cat((self.held[:, : self.used], positions), dim=1)
        self.held[self.rows, self.written] = positions
        self.held[:, self.capacity] = -1
        self.used = min(start + seq, self.capacity)
        self.place = Placement(
            positions,
            with_new if self.appended else self.held[:, : self.used],
            aligned=uniform and start == 0,
            last=uniform and seq == 1,
        )

    def can_return_to(self, lengths: Int[Tensor, " batch"], reach: int) -> bool:
        """True if the cache still holds all keys that the next token would see.

        Args:
            lengths: number of tokens to keep in each row.
            reach: how many of the latest positions a query sees, including its own.
        """
        oldest = (lengths - reach + 1).clamp(min=0)[:, None]
        is_held = self.held.gather(1, oldest % self.capacity) == oldest
        return bool((is_held | (oldest >= lengths[:, None])).all())

    def truncate(self, lengths: Int[Tensor, " batch"], longest: int) -> None:
        self.held.masked_fill_(self.held >= lengths[:, None], -1)
        self.used = min(longest, self.capacity)

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        self.held = self.held[index]
        self.rows = torch.arange(len(index), device=self.held.device)[:, None]


class KeyValueEntry(CacheEntry):
    """The cached keys and values of one attention layer, in contiguous tensors.

    The tensors are allocated on first use, in the dtype that attention computes in; under autocast
    this is not the dtype of the weights.
    """

    def __init__(self, slots: SlotPositions) -> None:
        self.slots = slots
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(self, k: NewKeys, v: NewValues) -> tuple[Keys, Values]:
        """Store the new keys and values; return all keys and values that the new tokens may see."""
        if self.k is None or self.v is None:
            self.k, self.v = self._room_for(k), self._room_for(v)
        return self._update(self.k, k), self._update(self.v, v)

    def _room_for(self, new: Tensor) -> Tensor:
        batch, heads, _, width = new.shape
        return new.new_zeros(batch, heads, self.slots.capacity + 1, width)

    def _update(self, stored: Tensor, new: Tensor) -> Tensor:
        slots = self.slots
        visible = stored[:, :, : slots.used]
        if slots.appended:
            before = slots.place.keys.shape[1] - new.shape[2]
            visible = torch.cat((stored[:, :, :before], new), dim=2)
        stored[slots.rows, :, slots.written] = new.transpose(1, 2)
        return visible

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[index], self.v[index]


class Cache(CacheView):
    """The keys and values of a batch of sequences; created by `Decoder.new_cache`.

    Attributes:
        capacity: maximum number of tokens per row.
        slack: number of newest tokens that `truncate` can always remove.

    Raises:
        WorkhorseError: a size is not a whole number in range, or does not fit into memory.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, slack: int = 0) -> None:
        sizes: dict[str, object] = {"batch": batch, "capacity": capacity, "slack": slack}
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise WorkhorseError(f"{name}={shown(size)} is not a whole number; give 0 or more")
        if batch < 1 or capacity < 1:
            raise WorkhorseError(
                f"a cache of {batch} rows × {capacity} tokens is empty; enlarge it"
            )
        self.capacity = capacity
        self.slack = slack
        self.length = 0
        self.lengths: Tensor
        try:
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        except (RuntimeError, TypeError):  # as in `SlotPositions`
            raise WorkhorseError(
                f"a cache of {batch} rows does not fit into memory; make it smaller"
            ) from None
        self.uniform: bool = True
        self.entries = []
        self.slot_positions: dict[int, SlotPositions] = {}

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> KeyValueEntry:
        """Create a layer's cache entry; see `Layers.layer`. `in_blocks` is ignored."""
        del in_blocks
        return KeyValueEntry(self._slots(reach))

    def place(self, reach: int | None) -> Placement:
        return self._slots(reach).place

    def _slots(self, reach: int | None) -> SlotPositions:
        """The slot positions for layers whose queries see the `reach` latest positions (None: all).

        They are created if necessary.
        """
        # Keep `slack` more tokens than the window: `truncate` makes them visible again.
        capacity = self.capacity if reach is None else min(reach + self.slack, self.capacity)
        if capacity not in self.slot_positions:
            self.slot_positions[capacity] = SlotPositions(
                len(self.lengths),
                capacity,
                rolling=capacity < self.capacity,
                device=self.lengths.device,
            )
        return self.slot_positions[capacity]

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        seq, uniform = positions.shape[1], self.uniform and uniform
        lengths = torch.maximum(self.lengths, positions.amax(dim=1) + 1)
        self.check_room(seq, None if uniform else lengths)
        self.uniform = uniform
        for slots in self.slot_positions.values():
            slots.begin(positions, start=self.length, uniform=uniform)
        self.length, self.lengths = min(self.length + seq, self.capacity), lengths

    def check_room(self, seq: int, lengths: Int[Tensor, " batch"] | None = None) -> None:
        """Raise an error if there is no room for more tokens.

        Args:
            seq: number of new columns.
            lengths: row lengths including the new tokens, needed if columns hold padding, which
                takes no room. They are read only if the columns would exceed the capacity.
        """
        full = self.length + seq > self.capacity
        if full and (lengths is None or bool((lengths > self.capacity).any())):
            raise WorkhorseError(
                f"{self.length} + {seq} tokens do not fit a cache of {self.capacity}; "
                "make one with more capacity"
            )

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[r]` tokens of each row r; rows with fewer tokens do not change.

        Raises:
            WorkhorseError: a length is out of range, or tokens that would be inside an attention
                window again have been overwritten. The cache is then unchanged.
        """
        self._check_lengths(lengths)
        kept = torch.tensor(lengths, device=self.lengths.device).minimum(self.lengths)
        for slots in self.slot_positions.values():
            if slots.rolling and not slots.can_return_to(kept, slots.capacity - self.slack):
                raise WorkhorseError(
                    f"cannot truncate to {min(lengths)} tokens: a window has overwritten tokens "
                    "visible there; make the cache with more slack"
                )
        for slots in self.slot_positions.values():
            slots.truncate(kept, max(lengths))
        self.uniform = self.uniform and len(set(lengths)) == 1
        self.length, self.lengths = max(lengths), kept

    def _check_lengths(self, lengths: Sequence[object]) -> None:
        """Raise a WorkhorseError if a length is greater than the length of its row.

        If rows differ in length, their lengths are read only on a CPU. On other devices the read
        would synchronise every pass, so each length is checked against the longest row.
        """
        held = [self.length] * len(self.lengths)
        if not self.uniform and self.lengths.device.type == "cpu":
            held = [int(length) for length in self.lengths]
        fitting = isinstance(lengths, list | tuple) and len(lengths) == len(held)
        if not fitting or not all(
            type(n) is int and 0 <= n <= most for n, most in zip(lengths, held, strict=True)
        ):
            raise WorkhorseError(
                f"lengths={shown(lengths)} are out of range for rows of {shown(held)} tokens; "
                "give each row a whole number from 0 to its length"
            )

    def select_rows(self, index: Int[Tensor, " rows"]) -> None:
        """Keep, reorder or repeat rows: row `index[r]` becomes row r."""
        self.lengths = self.lengths[index]
        for part in (*self.slot_positions.values(), *self.entries):
            part.select_rows(index)


class Layout(NamedTuple):
    """The structure of a paged cache for a `FixedCache`; equal layouts share a compiled program."""

    layers: tuple[tuple[Reach, bool], ...]
    """For each layer, its `Reach`, and True if its attention kernel reads blocks."""
    slack: int
    """Number of newest tokens that can always be removed."""


class CacheTensors(NamedTuple):
    """The tensors of a `PagedView`, as inputs of a compiled step.

    There is one block table per `Reach`, in the order in which the layers first use them.
    """

    lengths: Int[Tensor, " batch"]
    """Number of cached tokens in each row."""
    tables: list[Int[Tensor, "batch blocks_of_a_sequence"]]
    keys: list[Float[Tensor, "kv_heads blocks block width"]]
    values: list[Float[Tensor, "kv_heads blocks block width"]]


def layout_of(view: PagedView) -> Layout:
    """The `Layout` of a view's cache."""
    layers = tuple((store.pool.reach, store.in_blocks) for store in view.cache.stores)
    return Layout(layers, view.slack)


def tensors_of(view: PagedView) -> CacheTensors:
    """The tensors of a view, shared and not copied; at least one pass must have used the view."""
    stores = view.cache.stores
    reaches = dict.fromkeys(store.pool.reach for store in stores)
    return CacheTensors(
        view.lengths,
        [view.pages[reach].table for reach in reaches],
        [store.k for store in stores if store.k is not None],
        [store.v for store in stores if store.v is not None],
    )


class FixedCache(CacheView):
    """A view of a paged cache for one pass of a compiled step, with only tensors as state.

    The pass may add at most `slack + 1` tokens to each row.

    Args:
        layout: result of `layout_of` for a `PagedView`.
        tensors: result of `tensors_of` for the same view.
    """

    def __init__(self, layout: Layout, tensors: CacheTensors) -> None:
        self.lengths = tensors.lengths
        self.length = 0
        self.uniform = False  # masks come from the positions held
        self.slack = layout.slack
        reaches = dict.fromkeys(reach for reach, _ in layout.layers)
        self._pages = {
            reach: FixedPages(table) for reach, table in zip(reaches, tensors.tables, strict=True)
        }
        self.entries = [
            FixedEntry(self._pages[reach], k, v, in_blocks)
            for (reach, in_blocks), k, v in zip(
                layout.layers, tensors.keys, tensors.values, strict=True
            )
        ]

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        del uniform
        self.lengths += positions.shape[1]
        for pages in self._pages.values():
            pages.begin(positions, self.lengths)

    def place(self, reach: Reach) -> Placement:
        return self._pages[reach if reach in self._pages else None].place


class FixedPages:
    """Block tables of a `FixedCache` for layers with one `Reach`.

    A pass reads every slot of the tables; masks hide the empty slots.
    """

    def __init__(self, table: Int[Tensor, "batch blocks_of_a_sequence"]) -> None:
        self.table = table
        self.slots = table.shape[1] * BLOCK

    def begin(self, positions: Positions, lengths: Int[Tensor, " batch"]) -> None:
        self.writes = self.table.gather(1, positions // BLOCK), positions % BLOCK
        keys = torch.arange(self.slots, device=positions.device)[None]
        keys = torch.where(keys < lengths[:, None], keys, -1)
        self.place = Placement(positions, keys, in_blocks=True)


class FixedEntry(CacheEntry):
    """The cached keys and values of one layer in a `FixedCache`."""

    def __init__(self, pages: FixedPages, k: Tensor, v: Tensor, in_blocks: bool) -> None:
        self._pages = pages
        self._k, self._v = k, v
        self._in_blocks = in_blocks

    def update(self, k: NewKeys, v: NewValues) -> tuple[Tensor | InBlocks, Tensor | InBlocks]:
        return self._update(self._k, k), self._update(self._v, v)

    def _update(self, stored: Tensor, new: Tensor) -> Tensor | InBlocks:
        block, slot = self._pages.writes
        stored[:, block, slot] = new.transpose(0, 1)
        blocks = InBlocks(stored, self._pages.table, 0, self._pages.slots)
        return blocks if self._in_blocks else blocks.gathered()
