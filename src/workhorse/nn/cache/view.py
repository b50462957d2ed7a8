"""The interface between a forward pass and a KV cache. The caller owns the cache.

A `CacheView` represents the rows of one batch. It has a `CacheEntry` for each attention layer,
which stores new keys and values and returns all visible ones. Masks are computed only from
positions (`Placement`), so a model uses paged and fixed-shape caches in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from workhorse.nn.attention.masks import Placement
from workhorse.nn.shapes import Lengths, NewKeys, NewValues, Positions, Slots


class CacheEntry(ABC):
    """The cached keys and values of one attention layer, for the rows of a batch.

    Attributes:
        inputs: cache entries of the layer's short convolutions, by the name of the sub-layer.
        parts: if the pass packs several batches (see `CacheView.parts`), one entry per batch;
            otherwise empty.
    """

    inputs: Mapping[str, "CacheEntry"] = {}
    parts: "Sequence[CacheEntry]" = ()

    @abstractmethod
    def update(self, k: NewKeys, v: NewValues) -> tuple[Any, Any]:
        """Store the new keys and values; return all keys and values that the new tokens may see.

        Each result is a tensor `(batch, kv_heads, kv_seq, width)`, or `InBlocks` if the layer's
        attention kernel reads blocks.
        """


class LayerEntry(CacheEntry):
    """The cache entry of a layer with short convolutions, which store their inputs as keys.

    Args:
        attention: cache entry of the attention.
        inputs: cache entries of the convolutions; see `CacheEntry`.
    """

    def __init__(self, attention: CacheEntry, inputs: Mapping[str, CacheEntry]) -> None:
        self.attention = attention
        self.inputs = inputs
        self.parts = attention.parts

    def update(self, k: NewKeys, v: NewValues) -> tuple[Any, Any]:
        return self.attention.update(k, v)


class CacheView(ABC):
    """The cached sequences of a batch, one per row.

    Attributes:
        entries: cache entries of all layers, in the order of their `Block.cache_stores`.
        length: number of cached tokens in the longest row.
        lengths: number of cached tokens in each row, int64 `(batch,)`.
        uniform: True if all rows hold the positions 0, 1, 2 … to the same length, without padding.
        slack: number of newest tokens, of the longest length so far, that `truncate` can always
            remove.
        parts: if the pass packs several batches into one row of tokens, the view of each batch and
            its number of new tokens per sequence; otherwise empty.
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
        """Find the cache slots of the `reach - 1` tokens before each new token.

        The slots are those of layers with this `reach`; see `place`.

        Returns:
            slots: (batch, seq, reach - 1), latest token first. If a token does not exist, its slot
                is arbitrary.
            exists: bool of the same shape, True if the token exists.
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
            positions: (batch, seq), continuing the cached positions of each row; -1 is padding.
            uniform: True if the positions are those of `next_positions`, without padding.

        Raises:
            WorkhorseError: the cache is too small for the tokens. It is then unchanged.
        """

    @abstractmethod
    def place(self, reach: int | None) -> Placement:
        """The positions of the queries and keys of this pass, for layers with the same window.

        Args:
            reach: maximum number of keys that a query of these layers sees, including its own
                position; None: all.
        """


Storage_co = TypeVar("Storage_co", covariant=True)


@runtime_checkable
class Layers(Protocol[Storage_co]):
    """Interface for creating a cache: each layer of a model requests its storage."""

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> Storage_co:
        """Create a layer's storage: a `CacheEntry`, or the `Store` of a paged cache.

        Args:
            reach: maximum number of keys that a query of the layer sees, including its own
                position; None: all.
            in_blocks: True if the layer's attention kernel reads `InBlocks`; False if it needs one
                contiguous tensor.
        """
        ...
