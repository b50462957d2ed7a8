"""`micro_batch_size: auto`: the largest of a batch, half of it, a quarter … that fits in memory."""

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from workhorse.devices.memory import available, free_memory, size
from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.memory.device_memory import device_memory
from workhorse.models.parameters import count_parameters
from workhorse.native import resolve
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.processes import environment

if TYPE_CHECKING:  # which imports this package
    from workhorse.train.recipe.recipe import TrainConfig

MARGIN, SCATTERED = 0.1, 0.3
"""Fraction of the free memory that is left for validation, samples, what operators need inside
themselves, and gaps; and where the C library's heap scatters the tensors of a CPU."""


def fit_micro_batch(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> "TrainConfig":
    """The settings with a number for `micro_batch_size: auto`; others as they are.

    Nothing is tried out: steps are recorded on tensors without data, before the model is made, and
    the number follows from them and from how much memory is free.

    Args:
        config: of the decoder.
        train: how it is trained.
        device: where.
        packed: whether rows hold several documents.
        parallel: how the batch is divided; processes on this machine share its memory.

    Raises:
        WorkhorseError: not even one row fits, or free memory is not known on this device.
    """
    if train.micro_batch_size != "auto":
        return train
    check_fitting(device)
    free = available(device) if device.type == "cuda" else free_memory()
    assert free is not None  # `check_fitting` refused
    if device.type == "cpu":
        free //= environment.count_here(parallel.processes)

    @cache
    def needed(rows: int) -> int:
        tried = train.replace(micro_batch_size=rows)
        return step_bytes(config, tried, device, packed=packed, parallel=parallel)

    most = parallel.micro_batches(train.batch_size).size
    together = train.objective.rows_together
    rows = largest_share(needed, usable(free, device), most, together)
    if not rows:
        raise WorkhorseError(
            f"one row of {train.seq_len} tokens needs {size(needed(1))} and {size(free)} are free "
            f"on {device.type}, of which a step may take {size(usable(free, device))}; shorten "
            "train.seq_len, set train.activation_checkpointing=true, or take a smaller model"
        )
    return train.replace(micro_batch_size=rows)


def usable(free: int, device: torch.device) -> int:
    """Of the free memory, the bytes that a step may take."""
    scattered = device.type == "cpu" and resolve("heap", wait=True).heap is None
    return int((1 - (SCATTERED if scattered else MARGIN)) * free)


def check_fitting(device: torch.device) -> None:
    """Raise WorkhorseError if free memory is not known on this device."""
    if device.type not in ("cpu", "cuda"):
        raise WorkhorseError(
            f"micro_batch_size=auto works on CUDA and on a CPU, and device is {device}; "
            "give a number"
        )
    if device.type == "cpu" and free_memory() is None:
        raise WorkhorseError(
            f"micro_batch_size=auto cannot tell how much memory is free on {sys.platform}; "
            "give a number"
        )


def step_bytes(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> int:
    """The most bytes of a step in one process, with the copies that float16's autocast makes.

    Args:
        config: of the decoder.
        train: how it is trained; `micro_batch_size` is a number or None.
        device: where.
        packed: whether rows hold several documents.
        parallel: how weights and batch are divided.
    """
    recorded = recordable(train, device)
    found = device_memory(config, recorded, device, parallel, packed=packed)
    copies = 2 * count_parameters(config)["total"] if train.dtype == "float16" else 0
    return found.total + copies


def recordable(train: "TrainConfig", device: torch.device) -> "TrainConfig":
    """Settings whose step can be recorded: float16's as float32's, without autocast's copies."""
    dtype = str(training_dtype(train.dtype, device)).removeprefix("torch.")
    return train.replace(dtype="float32" if dtype == "float16" else dtype)


def largest_share(needed: Callable[[int], int], room: int, rows: int, together: int = 1) -> int:
    """The largest of `shares` for which `needed`, which grows, is at most `room`; 0 if none is."""
    sizes = shares(rows, together)
    first, last = 0, len(sizes)  # the whole is looked at first, then the middle of what is left
    while first < last:
        at = (first + last) // 2 if first else 0
        first, last = (first, at) if needed(sizes[at]) <= room else (at + 1, last)
    return sizes[first] if first < len(sizes) else 0


def shares(rows: int, together: int = 1) -> list[int]:
    """All of the rows, half of them … one, rounded up; or of groups of so many rows."""
    groups = rows // together
    halvings = math.ceil(math.log2(groups))
    return [together * math.ceil(groups / 2**count) for count in range(halvings + 1)]
