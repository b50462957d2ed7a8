"""The protocol between a forward pass and a cache. The caller owns the cache.

A view represents the rows of one batch. Each attention layer has an entry, which stores new keys
and values and returns all visible ones. Masks are computed only from positions (`Placement`), so
contiguous, paged and fixed-shape caches look the same to a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from workhorse.nn.attention.masks import Placement
from workhorse.nn.shapes import Lengths, NewKeys, NewValues, Positions, Slots


class CacheEntry(ABC):
    """The keys and values of one attention layer, for the rows of a batch.

    Attributes:
        inputs: entries of the layer's convolutions, by sub-layer.
        parts: the entries of the parts of a packed pass; see `CacheView.parts`.
    """

    inputs: Mapping[str, "CacheEntry"] = {}
    parts: "Sequence[CacheEntry]" = ()

    @abstractmethod
    def update(self, k: NewKeys, v: NewValues) -> tuple[Any, Any]:
        """Store the new keys and values; return all keys and values that the new tokens may see.

        The results are tensors `(batch, kv_heads, kv_seq, width)`, or `InBlocks` if the layer's
        kernel reads those.
        """


class LayerEntry(CacheEntry):
    """The entry of a layer that also has convolutions, which store their inputs as keys.

    Args:
        attention: entry of the attention.
        inputs: see `CacheEntry`.
    """

    def __init__(self, attention: CacheEntry, inputs: Mapping[str, CacheEntry]) -> None:
        self.attention = attention
        self.inputs = inputs
        self.parts = attention.parts

    def update(self, k: NewKeys, v: NewValues) -> tuple[Any, Any]:
        return self.attention.update(k, v)


class CacheView(ABC):
    """The rows of a batch in a cache.

    Attributes:
        entries: entries of all layers, in the order of their `Block.cache_stores`.
        length: number of columns consumed so far, counted in the longest row.
        lengths: number of tokens in each row, int64 `(batch,)`.
        uniform: True if all rows hold the positions 0, 1, 2 … to the same length, without padding.
        slack: number of newest tokens that can always be removed.
        parts: if the pass packs several batches into one row of tokens, the view of each batch and
            its number of new tokens per row; otherwise empty.
    """

    entries: list[Any]
    parts: Sequence[tuple[Any, int]] = ()
    length: int
    lengths: Tensor
    uniform: bool
    slack: int

    def next_positions(self, seq: int) -> Positions:
        """The positions of the next `seq` tokens of each row, (batch, seq)."""
        return self.lengths[:, None] + torch.arange(seq, device=self.lengths.device)

    def text_lengths(self) -> Lengths:
        """Length of the sequence that each new token belongs to, (batch, 1 or seq)."""
        return self.lengths[:, None]

    def slots_before(self, reach: int) -> tuple[Slots, Slots]:
        """The slots of the `reach - 1` tokens before each new token, in an entry with this reach.

        Returns:
            slots: (batch, seq, reach - 1), starting with the token just before; arbitrary if there
                is no such token.
            exists: bool of the same shape, True if there is such a token.
        """
        place = self.place(reach)
        queries, keys = place.queries, place.keys.expand(len(self.lengths), -1)
        back = torch.arange(1, reach, device=keys.device)
        wanted = (queries[..., None] - back).expand(len(keys), -1, -1)
        ordered, order = keys.sort(dim=1)
        found = torch.searchsorted(ordered, wanted.flatten(1)).clamp(max=keys.shape[1] - 1)
        exists = (ordered.gather(1, found) == wanted.flatten(1)).view_as(wanted) & (wanted >= 0)
        return order.gather(1, found).view_as(wanted), exists

    @abstractmethod
    def begin(self, positions: Positions, *, uniform: bool) -> None:
        """Register the positions of one forward pass, before the layers store its keys.

        Args:
            positions: (batch, seq), continuing the positions that a row holds; -1 is padding.
            uniform: True if the positions are `next_positions`, without padding.

        Raises:
            WorkhorseError: there is no room for the tokens. The cache is then unchanged.
        """

    @abstractmethod
    def place(self, reach: int | None) -> Placement:
        """The positions of the queries and keys of this pass.

        Args:
            reach: number of latest positions that a query of the layer sees; None: all.
        """


Room_co = TypeVar("Room_co", covariant=True)


@runtime_checkable
class Layers(Protocol[Room_co]):
    """A cache under construction, as a layer sees it."""

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> Room_co:
        """Create an entry or a store for a layer with this reach.

        Args:
            reach: see `CacheView.place`.
            in_blocks: True if the layer's kernel reads `InBlocks`; else it reads one tensor.
        """
        ...
