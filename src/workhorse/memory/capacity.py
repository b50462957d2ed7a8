"""Checks that a training step fits into memory, and the size of its micro-batches."""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch

from workhorse.devices.memory import available, check_fits, free_memory, size
from workhorse.devices.names import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import count_parameters, flops_per_token
from workhorse.native import resolve
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.parallel.processes import environment

LONG = 2e14
"""Minimum floating-point operations of a run for which a step is recorded as a memory check. The
check then adds less than 1 % to the run's time."""


def check_training(step: PlannedStep) -> None:
    """Raise an error if training does not fit into memory.

    The memory of weights, gradients and optimizer state is always checked. On a CPU the peak of a
    whole step is checked too, because the operating system kills a process that runs out of memory.
    Short runs skip this check, because it takes time. On a GPU, CUDA reports out-of-memory errors.
    Each rank on this machine needs the same memory.

    Raises:
        WorkhorseError: training does not fit.
    """
    check_held(step)
    train = step.train
    decoder = step.config.build(train.kernel, device="meta")
    operations = train.tokens_per_step * flops_per_token(decoder, train.seq_len)
    is_long = train.steps is None or train.steps * operations >= LONG
    if step.device.type == "cpu" and is_long:
        rows = train.micro_batches(step.parallel).size
        what = f"a micro-batch of {rows:,} sequences of {train.seq_len:,} tokens"
        remedy = "set train.micro_batch_size=auto, or run workhorse plan for suggestions"
        _check(step_bytes(step), step.device, what, remedy)


def check_held(step: PlannedStep) -> None:
    """Raise an error if weights, gradients and optimizer state already exceed the memory.

    Raises:
        WorkhorseError: weights, gradients and optimizer state do not fit.
    """
    config, train, parallel = step.config, step.train, step.parallel
    dtype = training_dtype(train.dtype, step.device)
    if step.adapter is None:
        decoder = config.build(train.kernel, device="meta")
    else:
        decoder = step.adapter.trainable(config, train.kernel, torch.device("meta"), dtype)
    low_bits = round_weights(decoder) if dtype == torch.bfloat16 else {}
    optimizer = build_optimizer(decoder, train.optimizer, low_bits)
    learning = [weight for weight in decoder.parameters() if weight.requires_grad]
    weights = [*decoder.parameters(), *decoder.buffers()]
    held = [*weights, *learning, *optimizer.tensors().values(), *low_bits.values()]
    what = "the model with its gradients and optimizer state"
    ways = max(parallel.weight_parts, parallel.expert) * parallel.tensor * parallel.pipeline
    needed = sum(tensor.nbytes for tensor in held) // ways
    _check(needed, step.device, what, "use a smaller model or a device with more memory")


def _check(n_bytes: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise an error if the device has less memory than `n_bytes` per process that shares it."""
    sharers = environment.count_here() if device.type == "cpu" else 1
    if sharers > 1:
        what += f" in {sharers} processes"
        remedy = f"start fewer processes, shard the weights with parallel.shard, or {remedy}"
    check_fits(sharers * n_bytes, device, what, remedy)


MARGIN, SCATTERED = 0.1, 0.3
"""Fraction of the free memory reserved for validation, samples, workspaces of operators and
fragmentation. `SCATTERED` applies to a CPU with the C library's heap, which fragments more."""


def fit_micro_batch(step: PlannedStep) -> PlannedStep:
    """Replace `micro_batch_size: auto` by the largest size that fits into the free memory.

    A step with another `micro_batch_size` is returned unchanged. No step is executed: the memory
    that a size needs is determined by recording a step on tensors without data. Ranks on this
    machine share its memory.

    Raises:
        WorkhorseError: not even one row fits, or free memory is not known on this device.
    """
    train, device = step.train, step.device
    if train.micro_batch_size != "auto":
        return step
    check_fitting(device)
    free = available(device) if device.type == "cuda" else free_memory()
    assert free is not None  # `check_fitting` raised otherwise
    if device.type == "cpu":
        free //= environment.count_here(step.parallel.processes)

    @cache
    def needed(rows: int) -> int:
        return step_bytes(step.with_train(micro_batch_size=rows))

    most = step.parallel.micro_batches(train.batch_size).size
    together = train.objective.rows_together
    rows = largest_share(needed, usable(free, device), most, together)
    if not rows:
        raise WorkhorseError(
            f"one sequence of {train.seq_len} tokens needs {size(needed(1))}, but a step may use "
            f"{size(usable(free, device))} of the {size(free)} free on {device.type}; reduce "
            "train.seq_len, set train.activation_checkpointing=true, or use a smaller model"
        )
    return step.with_train(micro_batch_size=rows)


def usable(free: int, device: torch.device) -> int:
    """Bytes of the free memory that a step may use."""
    scattered = device.type == "cpu" and resolve("heap", wait=True).heap is None
    return int((1 - (SCATTERED if scattered else MARGIN)) * free)


def check_fitting(device: torch.device) -> None:
    """Raise WorkhorseError if free memory is not known on this device."""
    if device.type not in ("cpu", "cuda"):
        raise WorkhorseError(
            f"micro_batch_size=auto is not supported on device={device}, only on cuda and cpu; "
            "give a number"
        )
    if device.type == "cpu" and free_memory() is None:
        raise WorkhorseError(
            f"micro_batch_size=auto cannot determine the free memory on {sys.platform}; "
            "give a number"
        )


def step_bytes(step: PlannedStep) -> int:
    """Peak memory of a step on one rank in bytes, including the copies of float16 autocast."""
    half = step.train.dtype == "float16"
    copies = 2 * count_parameters(step.config)["total"] if half else 0
    return device_memory(recordable(step)).total + copies


def recordable(step: PlannedStep) -> PlannedStep:
    """Replace the dtype by one with which a step can be recorded: float16 becomes float32.

    The float16 copies of weights that autocast makes are then missing from the record.
    """
    dtype = str(training_dtype(step.train.dtype, step.device)).removeprefix("torch.")
    return step.with_train(dtype="float32" if dtype == "float16" else dtype)


def largest_share(needed: Callable[[int], int], room: int, rows: int, together: int = 1) -> int:
    """The largest of `shares(rows, together)` that needs at most `room` bytes; 0 if none does.

    `needed` returns the bytes for a micro-batch size and must be an increasing function.
    """
    sizes = shares(rows, together)
    if needed(sizes[0]) <= room:  # tried first, because all rows often fit
        return sizes[0]
    at = bisect_left(sizes, True, lo=1, key=lambda size: needed(size) <= room)
    return (*sizes, 0)[at]


def shares(rows: int, together: int = 1) -> list[int]:
    """Candidate micro-batch sizes: `rows`, `rows / 2`, …, rounded up to multiples of `together`.

    `together` is the number of rows that must be in the same pass.
    """
    groups = rows // together
    halvings = math.ceil(math.log2(groups))
    return [together * math.ceil(groups / 2**count) for count in range(halvings + 1)]
