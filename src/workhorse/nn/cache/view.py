"""What a forward pass asks of a cache, whatever it is made of.

A cache view stands for the rows of one batch. Attention layers get an entry each: it stores the new
keys and values and gives back all that may be attended to. Masks come from positions alone
(`Placement`), so contiguous, paged and fixed-shape caches need no cases of their own in a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from workhorse.nn.attention.masks import Placement
from workhorse.nn.shapes import NewKeys, NewValues, Positions


class CacheEntry(ABC):
    """The keys and values of one attention layer, for the rows of a batch."""

    @abstractmethod
    def update(self, k: NewKeys, v: NewValues) -> tuple[Any, Any]:
        """Store the new keys and values; returns all that the new tokens may attend to.

        They are tensors `(batch, kv_heads, kv_seq, width)`, or `InBlocks` where the layer's kernel
        reads those.
        """


class CacheView(ABC):
    """The rows of a batch in a cache.

    Attributes:
        entries: one for each layer.
        length: columns consumed so far; those of the longest row.
        lengths: tokens of each row, int64 `(batch,)`.
        uniform: whether every row holds 0, 1, 2 … without padding, and as many as the others.
        slack: the newest tokens that can be taken back however long the text.
    """

    entries: list[Any]
    length: int
    lengths: Tensor
    uniform: bool
    slack: int

    def next_positions(self, seq: int) -> Positions:
        """Where the next `seq` tokens of each row stand, (batch, seq)."""
        return self.lengths[:, None] + torch.arange(seq, device=self.lengths.device)

    @abstractmethod
    def begin(self, positions: Positions, *, uniform: bool) -> None:
        """Take in the positions of one forward pass, before the layers store its keys.

        Args:
            positions: (batch, seq); in each row they count on from what the row holds, and -1 is
                padding.
            uniform: the positions are `next_positions`, nothing padded.

        Raises:
            WorkhorseError: more tokens than there is room for. The cache is then as it was.
        """

    @abstractmethod
    def place(self, reach: int | None) -> Placement:
        """Where the queries and keys of this pass stand.

        Args:
            reach: how many positions back the layer's queries see; None: all of them.
        """

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[r]` tokens of each row r, at most what it holds.

        Raises:
            WorkhorseError: these are no such lengths, or a window has moved past what it would
                show. The cache is then as it was.
        """


Room_co = TypeVar("Room_co", covariant=True)


@runtime_checkable
class Layers(Protocol[Room_co]):
    """A cache as a layer meets it when the cache is made."""

    def layer(self, reach: int | None, *, in_blocks: bool = False) -> Room_co:
        """Room for a layer of that reach, whose kernel reads blocks if asked."""
        ...
