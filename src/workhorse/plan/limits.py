"""The most that fits on a device, and what to change when a training step does not fit."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from workhorse.config.base import ConfigError
from workhorse.memory.device_memory import device_memory
from workhorse.nn import DecoderConfig
from workhorse.optim.muon import MuonConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.recipe import TrainConfig

MOST_DEVICES = 4096
MOST_TOKENS = 2**17
"""No more at once is tried: how much a large device has for a tiny model tells nothing."""
FINEST = 8
"""The longest rows are found to one part in so many."""


class Limits(NamedTuple):
    """What fits on a device."""

    micro_batch_size: int
    """The most rows at once, of the planned length; 0: not one."""
    seq_len: int
    """The longest rows, one at a time; 0: none that was tried."""
    mesh: ParallelismConfig | None
    """The fewest devices, a row of the planned length for each replica; None: no number tried."""


def limits(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    mesh: ParallelismConfig,
    room: int,
    *,
    packed: bool = False,
) -> Limits:
    """What fits in `room` bytes of each device.

    Args:
        config: of the decoder.
        train: how it is trained.
        device: the kind.
        mesh: of the first two limits.
        room: bytes of each device.
        packed: whether rows hold several documents.
    """
    memory = partial(device_memory, packed=packed)
    update = memory(config, train, device, mesh).update

    def needed(rows: int, length: int) -> int:
        batch = rows * mesh.parts * mesh.pipeline  # so that the first stage is as full as it gets
        if train.batch_size > batch:  # in several micro-batches, whose gradients are summed
            batch *= 2
        changed = train.replace(batch_size=batch, micro_batch_size=rows, seq_len=length)
        longer = config.replace(max_seq_len=max(config.max_seq_len, length))
        return max(update, memory(longer, changed, device, mesh, updates=False).total)

    rows = length = 0
    if update <= room:
        most = max(1, MOST_TOKENS // train.seq_len)
        rows = most_rows(lambda rows: needed(rows, train.seq_len), room, most)
        length = longest(lambda length: needed(1, length), room, train.seq_len)
    return Limits(rows, length, smallest_mesh(config, train, device, room, packed=packed))


def most_rows(needed: Callable[[int], int], room: int, most: int) -> int:
    """The largest argument up to `most` for which `needed`, which grows, is at most `room`."""
    return _most(needed, room, 1, most, lambda rows: 1)


def longest(needed: Callable[[int], int], room: int, start: int) -> int:
    """The longest rows that fit, to one part in `FINEST`; 0: not one token."""
    return _most(needed, room, start, max(start, MOST_TOKENS), _fine)


def _most(
    needed: Callable[[int], int], room: int, start: int, most: int, fine: Callable[[int], int]
) -> int:
    """The most that fits, to within `fine` of it; each guess follows from the sizes before it.

    Args:
        needed: bytes of a size, which grow with it.
        room: bytes.
        start: the size to begin with.
        most: the largest size to try.
        fine: how finely to search around a size.
    """
    known: dict[int, int] = {}

    def fits(size: int) -> bool:
        known[size] = needed(size)
        return known[size] <= room

    low, high = start, min(2 * start, most)
    while not fits(low):
        low, high = low // 2, low
        if low == 0:
            return 0
    while high not in known and fits(high):
        if high == most:
            return most
        guess = _expected(known, room, high, most)
        low, high = high, min(max(guess - guess % fine(guess), high + fine(high)), most)
    while high - low > fine(low):
        guess = _expected(known, room, low, high)
        middle = min(max(guess - guess % fine(guess), low + fine(low)), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _expected(known: dict[int, int], room: int, low: int, high: int) -> int:
    """The size from `low` to `high` at which a parabola through known sizes reaches `room`.

    Bytes grow linearly with rows and with their length, or, where scores or masks are stored, with
    the square of the length.
    """
    x, y, *others = sorted(known, key=lambda size: abs(known[size] - room))[:3]
    slope = (known[y] - known[x]) / (y - x)
    bend = 0.0
    if others:
        (z,) = others
        bend = ((known[z] - known[x]) / (z - x) - slope) / (z - y)

    def expected(size: int) -> float:
        return known[x] + (size - x) * (slope + (size - y) * max(bend, 0.0))

    return max(low, low + bisect_right(range(low, high + 1), room, key=expected) - 1)


def _fine(length: int) -> int:
    """A power of two, at most one part in `FINEST`."""
    return 1 << max(0, (length // FINEST).bit_length() - 1)


def smallest_mesh(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    room: int,
    *,
    packed: bool = False,
) -> ParallelismConfig | None:
    """The fewest devices that hold a step with one row for each replica.

    Powers of two are tried, divided among `shard` and `tensor`.
    """
    held = 0
    for mesh in _meshes():
        if held > room * mesh.processes:
            continue
        changed = train.replace(batch_size=mesh.replicas, micro_batch_size=1)
        try:
            found = device_memory(config, changed, device, mesh, packed=packed)
        except ConfigError:
            continue  # the model cannot be divided like this
        if found.total <= room:
            return mesh
        if mesh.processes == 1:
            held = sum(sum(sizes.values()) for sizes in found.held.values())
    return None


def _meshes() -> Iterator[ParallelismConfig]:
    """Fewer devices first; of as many, less tensor parallelism, the dearest way to divide."""
    devices = 1
    while devices <= MOST_DEVICES:
        for tensor in (1, 2, 4, 8):
            if devices % tensor == 0:
                yield ParallelismConfig(shard=devices // tensor, tensor=tensor)
        devices *= 2


WORTHWHILE = 0.01
"""The smallest part of the peak whose saving makes a change a remedy."""
NAMED = 3
"""Remedies that are named."""


class Remedy(NamedTuple):
    """A change of settings."""

    setting: str
    cost: str
    saves: int
    """Bytes of the peak."""
    fits: bool


def remedies(
    config: DecoderConfig,
    train: TrainConfig,
    device: torch.device,
    mesh: ParallelismConfig,
    room: int,
    *,
    packed: bool = False,
) -> list[Remedy]:
    """The three cheapest remedies, and the next that makes the step fit if none of them does.

    Args:
        config: of the decoder.
        train: how it is trained.
        device: the kind.
        mesh: of the devices.
        room: bytes of each device.
        packed: whether rows hold several documents.
    """
    memory = partial(device_memory, packed=packed)
    now = memory(config, train, device, mesh)
    before = now.total
    found: dict[str, Remedy] = {}
    for setting, cost, changed, wider in _changes(train, mesh):
        key = setting.partition("=")[0]
        if key in found and found[key].fits:
            continue
        try:
            # Rows, their length and checkpointing leave the update as it is.
            updates = wider != mesh or (
                (changed.dtype, changed.optimizer) != (train.dtype, train.optimizer)
            )
            after = memory(config, changed, device, wider, updates=updates).total
            after = after if updates else max(after, now.update)
        except ConfigError:
            continue
        if before - after >= WORTHWHILE * before:
            found[key] = Remedy(setting, cost, before - after, after <= room)
    cheapest = list(found.values())
    named, dearer = cheapest[:NAMED], cheapest[NAMED:]
    if not any(remedy.fits for remedy in named):
        named += [remedy for remedy in dearer if remedy.fits][:1]
    return named


def _changes(
    train: TrainConfig, mesh: ParallelismConfig
) -> Iterator[tuple[str, str, TrainConfig, ParallelismConfig]]:
    """Setting, cost and what they lead to, from changes of no result to those of the training.

    Of changes of one setting the first that fits is the remedy.
    """
    own = train.micro_batches(mesh)
    rows = own.size
    while rows > 1:
        rows //= 2
        yield (
            f"train.micro_batch_size={rows}",
            "the same gradient; small gemms are slower",
            train.replace(micro_batch_size=rows),
            mesh,
        )
    if not train.activation_checkpointing:
        yield (
            "train.activation_checkpointing=true",
            "a third more arithmetic",
            train.replace(activation_checkpointing=True),
            mesh,
        )
    if train.dtype == "float32":
        yield (
            "train.dtype=bfloat16",
            "activations and gradients are rounded",
            train.replace(dtype="bfloat16"),
            mesh,
        )
    with suppress(ConfigError):  # a division that does not go with twice as many
        wider, batch = mesh.replace(shard=2 * mesh.shard), train.batch_size
        more = "" if own.rows > 1 else f" train.batch_size={2 * batch}"
        yield (
            f"parallel.shard={wider.shard}{more}",
            "twice the devices",
            train.replace(batch_size=2 * batch if more else batch),
            wider,
        )
    if not isinstance(train.optimizer, MuonConfig):
        yield (
            "train.optimizer.kind=muon",
            "another optimizer: tune its learning rate",
            train.replace(optimizer=MuonConfig()),
            mesh,
        )
    if train.seq_len > 1:
        yield (
            f"train.seq_len={train.seq_len // 2}",
            "half the context",
            train.replace(seq_len=train.seq_len // 2),
            mesh,
        )
