"""`micro_batch_size: auto`: the largest of a batch, half of it, a quarter … that fits in memory."""

import math
import sys

import torch

from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.memory import free_memory, most_resident, resident
from workhorse.train.resume.random_state import random_state, set_random_state
from workhorse.train.step.step import TrainingStep

MARGIN = 0.1
"""Fraction of the free memory that is left for validation, samples and the allocator's gaps."""


def fit_micro_batch(step: TrainingStep, batch: Batch) -> None:
    """Set a step's `micro_batch_size` to the largest share of a batch that fits.

    Rows of the batch pass forwards and backwards; weights, optimizer, gradients and random
    generators are restored afterwards. No update is tried: it needs the same memory for any size.

    Args:
        step: not yet compiled, since each number of rows would be compiled separately.
        batch: of the whole size, on the CPU.

    Raises:
        WorkhorseError: not even one row fits, or free memory cannot be measured on this device.
    """
    check_fitting(step.device)
    before = random_state()
    try:
        step.micro_batch_size = _FINDERS[step.device.type](step, batch)
    finally:
        set_random_state(before)


def check_fitting(device: torch.device) -> None:
    """Raise WorkhorseError if free memory cannot be measured on this device."""
    if device.type not in _FINDERS:
        raise WorkhorseError(
            f"micro_batch_size=auto works on CUDA and on a CPU, and device is {device}; "
            "give a number"
        )
    if device.type == "cpu" and free_memory() is None:
        raise WorkhorseError(
            f"micro_batch_size=auto cannot tell how much memory is free on {sys.platform}; "
            "give a number"
        )


def _downwards(step: TrainingStep, batch: Batch) -> int:
    """Try sizes from the largest, on CUDA, where running out of memory is a harmless error."""
    for size in shares(len(batch.tokens)):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(step.device)
        try:
            _try(step, batch, size)
            left, _ = torch.cuda.mem_get_info(step.device)  # freed memory is still reserved
        except torch.OutOfMemoryError:
            left = 0
        torch.cuda.empty_cache()
        if left >= MARGIN * free:
            return size
    raise _no_room(batch, "does not fit", free)


def _upwards(step: TrainingStep, batch: Batch) -> int:
    """Try sizes from the smallest while the next is sure to fit, on a CPU.

    There the system kills a process that takes too much.
    """
    free, start = free_memory(), resident()
    assert free is not None  # `check_fitting` refused
    budget = int(free * (1 - MARGIN))
    # The gradient of earlier micro-batches, in float32, is the same for any size.
    held = 4 * sum(weight.numel() for weight in step.optimizer.masters.parameters.values())
    fitting = took = before = 0
    for size in reversed(shares(len(batch.tokens))):
        # Twice the rows take at most twice the memory, and twice what was added last.
        if fitting and took + min(took - held, 2 * (took - before)) > budget:
            break
        _try(step, batch, size)
        before, took = took, max(took, most_resident() - start)
        if took > budget:
            break
        fitting = size
    if not fitting:
        raise _no_room(batch, f"takes {_mib(took)}", free)
    return fitting


_FINDERS = {"cuda": _downwards, "cpu": _upwards}


def shares(rows: int) -> list[int]:
    """All of the rows, half of them … one, rounded up."""
    halvings = math.ceil(math.log2(rows))
    return [math.ceil(rows / 2**count) for count in range(halvings + 1)]


def _try(step: TrainingStep, batch: Batch, size: int) -> None:
    """Pass two micro-batches, the second adding to the gradient of the first; or the batch."""
    step.micro_batch_size = size
    try:
        step.backward(batch.rows(0, 2 * size))
    finally:
        step.forget()


def _no_room(batch: Batch, needed: str, free: int) -> WorkhorseError:
    return WorkhorseError(
        f"one row of {batch.tokens.shape[1]} tokens {needed}, and {_mib(free)} are free; shorten "
        "train.seq_len, set train.activation_checkpointing=true, or take a smaller model"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
