"""What to change when a training step does not fit, and what each change saves and costs."""

from collections.abc import Iterator
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
