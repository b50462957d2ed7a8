"""A cache in shapes that stay the same from token to token: what a compiled step works on.

`Cache` counts in Python and shows attention as many slots as are used, so to a compiler every token
is another program. A `FixedCache` is a view of the same tensors that takes one more token of each
row, or as many as can be taken back: whatever changes is in a tensor, and the slots shown suffice
for many tokens. What a query may see is decided as ever by the position that each slot holds.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workhorse.nn.attention.masks import Placement
from workhorse.nn.cache.contiguous import Cache, KeyValueEntry, Track
from workhorse.nn.shapes import Positions

SLOTS_AT_ONCE = 128
"""The slots shown grow by so many; fewer would be shown too few, more be read in vain."""


class Layout(NamedTuple):
    """What of a cache is no tensor: caches of one layout are served by one program."""

    entries: tuple[int | None, ...]
    """For each layer the slots of its rolling track, or None where it keeps everything."""
    slack: int
    """See `Cache`; 0 where nothing rolls, which it makes no difference to."""


class CacheTensors(NamedTuple):
    """The tensors of a cache; those of tracks in the order in which layers first use them."""

    lengths: Int[Tensor, " batch"]
    """Tokens of each row."""
    held: list[Int[Tensor, "batch slots"]]
    """The position in each slot of each track."""
    shown: list[Int[Tensor, " shown"]]
    """Says by its length how many slots of each track are shown; holds nothing."""
    keys: list[Float[Tensor, "batch heads slots width"]]
    values: list[Float[Tensor, "batch heads slots width"]]


def layout_of(cache: Cache) -> Layout:
    """The layout of a cache."""
    entries = tuple(_key(entry.track) for entry in cache.entries)
    return Layout(entries, cache.slack if any(entries) else 0)


def tensors_of(cache: Cache, seq: int) -> CacheTensors:
    """The tensors of a cache that has consumed something; they are shared, not copied.

    Args:
        cache: whose they are.
        seq: tokens of each row that are to come.
    """
    tracks = list({_key(entry.track): entry.track for entry in cache.entries}.values())
    stored = [(entry.k, entry.v) for entry in cache.entries]
    return CacheTensors(
        cache.lengths,
        [track.held for track in tracks],
        [track.held.new_empty(_shown(track, seq)) for track in tracks],
        [k for k, _ in stored if k is not None],
        [v for _, v in stored if v is not None],
    )


def _key(track: Track) -> int | None:
    return track.capacity if track.rolling else None


def _shown(track: Track, seq: int) -> int:
    """Slots to show: those used, the next tokens', and some to come."""
    wanted = -(-(track.used + seq) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
    return min(wanted, track.capacity)


class FixedCache(Cache):
    """A cache for one forward pass over `slack + 1` tokens of each row at most.

    So many may be written at once even where a window rolls: what they overwrite is out of sight
    of the first of them.

    What it takes in is written into the tensors; counting is left to the cache they came from
    (`Cache.advance`).

    Args:
        layout: of that cache.
        tensors: its tensors.
    """

    def __init__(self, layout: Layout, tensors: CacheTensors) -> None:
        self.lengths = tensors.lengths
        self.length = 0
        self.uniform = False  # masks come from the positions held
        self.slack = layout.slack
        keys = dict.fromkeys(layout.entries)
        self.by_slots = {
            key: FixedTrack(held, len(shown), key)
            for key, held, shown in zip(keys, tensors.held, tensors.shown, strict=True)
        }
        self.entries = [
            FixedEntry(self.by_slots[key], k, v)
            for key, k, v in zip(layout.entries, tensors.keys, tensors.values, strict=True)
        ]

    def track(self, reach: int | None) -> Track:
        slots = None if reach is None else reach + self.slack
        return self.by_slots[slots if slots in self.by_slots else None]

    def begin(self, positions: Positions, *, uniform: bool) -> None:
        del uniform
        for track in self.by_slots.values():
            track.begin(positions, start=0, uniform=False)
        self.lengths += positions.shape[1]


class FixedTrack(Track):
    """A track that shows a fixed number of slots."""

    def __init__(self, held: Int[Tensor, "batch slots"], shown: int, modulus: int | None) -> None:
        self.held = held
        self.shown = shown
        self.modulus = modulus
        self.rows = torch.arange(held.shape[0], device=held.device)[:, None]

    def begin(self, positions: Positions, *, start: int, uniform: bool) -> None:
        del start, uniform
        self.slots = positions if self.modulus is None else positions % self.modulus
        self.held[self.rows, self.slots] = positions
        self.place = Placement(positions, self.held[:, : self.shown])


class FixedEntry(KeyValueEntry):
    """Keys and values of one layer."""

    def __init__(self, track: FixedTrack, k: Tensor, v: Tensor) -> None:
        super().__init__(track)
        self.k, self.v, self.shown = k, v, track.shown

    def _update(self, stored: Tensor, new: Tensor) -> Tensor:
        stored[self.track.rows, :, self.track.slots] = new.transpose(1, 2)
        return stored[:, :, : self.shown]
