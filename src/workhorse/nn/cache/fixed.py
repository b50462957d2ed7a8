"""A view of a paged cache for compiled steps, with only tensors as state.

A `PagedView` counts tokens in Python ints, so a compiler would recompile for every token. A
`FixedCache` uses the view's tensors for one pass over up to `slack + 1` new tokens of each row.
The caller reserves blocks for the new tokens before the pass (`PagedView.reserve`) and counts the
tokens after it (`PagedView.advance`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workhorse.nn.attention.masks import Placement
from workhorse.nn.cache.paged import BLOCK, InBlocks, Reach
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheEntry, CacheView
from workhorse.nn.shapes import NewKeys, NewValues, Positions


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
    """Return the `Layout` of the cache of a view."""
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
    """A view of a paged cache for one pass of a compiled step.

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
