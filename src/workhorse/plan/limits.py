"""The most that fits into a device, and the fewest devices that a model fits on."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from workhorse.config import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.plan.device_memory import device_memory
from workhorse.plan.mesh import MeshConfig
from workhorse.train.recipe.recipe import TrainConfig

MOST_SHARDS = 4096
MOST_TOKENS = 2**17
"""Nothing longer or larger is tried: a tiny model's limit on a large device tells nothing."""
MOST_ROWS = 64
"""Times as many rows as before are tried next at most."""
FINEST = 8
"""The longest context is found to one part in so many."""


class Limits(NamedTuple):
    """What fits into a device."""

    micro_batch_size: int
    """The most rows at once, of the planned length; 0: not one."""
    seq_len: int
    """The longest rows, one at a time; 0: none that was tried."""
    mesh: MeshConfig | None
    """The fewest devices for one row each of the planned length; None: it fits on none tried."""


def limits(
    config: DecoderConfig, train: TrainConfig, device: torch.device, mesh: MeshConfig, room: int
) -> Limits:
    """What fits into `room` bytes of each device.

    Args:
        config: of the decoder.
        train: how it is trained.
        device: the kind.
        mesh: that the first two limits are for.
        room: bytes.
    """
    update = device_memory(config, train, device, mesh).update

    def needed(rows: int, length: int) -> int:
        batch = rows * mesh.replicas
        changed = train.replace(batch_size=batch, micro_batch_size=rows, seq_len=length)
        longer = config.replace(max_seq_len=max(config.max_seq_len, length))
        return max(update, device_memory(longer, changed, device, mesh, updates=False).total)

    rows = length = 0
    if update <= room:
        most = max(1, MOST_TOKENS // train.seq_len)
        rows = most_rows(lambda rows: needed(rows, train.seq_len), room, most)
        length = longest(lambda length: needed(1, length), room, train.seq_len)
    return Limits(rows, length, smallest_mesh(config, train, device, room))


def most_rows(needed: Callable[[int], int], room: int, most: int) -> int:
    """The largest argument up to `most` for which `needed`, which grows, is at most `room`."""
    if needed(1) > room:
        return 0
    low, high = 1, 2
    while high <= most and needed(high) <= room:
        # Bytes are about a line through the last two; the guess saves most doublings.
        slope = (needed(high) - needed(low)) / (high - low)
        guess = high + int((room - needed(high)) / slope) if slope > 0 else 2 * high
        low, high = high, max(high + 1, min(guess, MOST_ROWS * high))
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle)
    return low


def longest(needed: Callable[[int], int], room: int, start: int) -> int:
    """The longest rows that fit, to one part in `FINEST`."""
    low, high = 0, start
    if needed(start) <= room:
        while high <= MOST_TOKENS and needed(high) <= room:
            low, high = high, 2 * high
        if high > MOST_TOKENS:
            return low
    else:
        while high > 1 and needed(high) > room:
            low, high = high // 2, high // 2
        low, high = (high, 2 * high) if needed(high) <= room else (0, high)
    step = max(1, low // FINEST)
    while high - low > step:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle)
    return low


def smallest_mesh(
    config: DecoderConfig, train: TrainConfig, device: torch.device, room: int
) -> MeshConfig | None:
    """The fewest devices that hold the model while each trains on one row."""
    for mesh in _meshes():
        changed = train.replace(batch_size=mesh.replicas, micro_batch_size=1)
        try:
            if device_memory(config, changed, device, mesh).total <= room:
                return mesh
        except ConfigError:
            continue  # it cannot be divided so
    return None


def _meshes() -> Iterator[MeshConfig]:
    """By devices; of as many, those with less tensor parallelism, which costs most, first."""
    devices = 1
    while devices <= MOST_SHARDS:
        for tensor in (1, 2, 4, 8):
            if devices % tensor == 0:
                yield MeshConfig(shard=devices // tensor, tensor=tensor)
        devices *= 2
