"""Whether training fits into memory, before anything is allocated."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workhorse.devices.memory import check_fits
from workhorse.devices.names import training_dtype
from workhorse.memory.micro_batch import step_bytes
from workhorse.models.flops import flops_per_token
from workhorse.nn import DecoderConfig
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.processes import environment

if TYPE_CHECKING:  # which imports this package
    from workhorse.train.recipe.recipe import TrainConfig

LONG = 2e14
"""Floating-point operations of a run so long that recording a step delays it by less than 1 %."""


def check_training(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    *,
    packed: bool = False,
    parallel: ParallelismConfig = UNDIVIDED,
) -> None:
    """Refuse to train what memory has no room for.

    Weights, gradients and optimizer are counted at once. On a CPU, where the system would end the
    process, the whole step is recorded as well, if the run is long enough to be worth it; CUDA says
    by itself when its memory is full.

    Args:
        config: of the decoder.
        train: how it is trained; `micro_batch_size` is a number or None.
        device: where.
        packed: whether rows hold several documents.
        parallel: how weights and batch are divided; every process on this machine needs as much.

    Raises:
        WorkhorseError: there is less.
    """
    check_held(config, train, device, parallel)
    decoder = config.build(train.kernel, device="meta")
    operations = train.tokens_per_step * flops_per_token(decoder, train.seq_len)
    is_long = train.steps is None or train.steps * operations >= LONG
    if device.type == "cpu" and is_long:
        rows = train.micro_batches(parallel).size
        what = f"a step with {rows:,} rows of {train.seq_len:,} tokens at once"
        remedy = "set train.micro_batch_size=auto, or see what workhorse plan suggests"
        needed = step_bytes(config, train, device, packed=packed, parallel=parallel)
        _check(needed, device, what, remedy)


def check_held(
    config: DecoderConfig,
    train: "TrainConfig",
    device: torch.device,
    parallel: ParallelismConfig = UNDIVIDED,
) -> None:
    """Refuse to train where weights, gradients and optimizer alone have no room.

    Raises:
        WorkhorseError: there is less.
    """
    decoder = config.build(train.kernel, device="meta")
    narrow = training_dtype(train.dtype, device) == torch.bfloat16
    low_bits = round_weights(decoder) if narrow else {}
    optimizer = build_optimizer(decoder, train.optimizer, low_bits)
    learning = [weight for weight in decoder.parameters() if weight.requires_grad]
    held = [*decoder.parameters(), *learning, *optimizer.tensors().values(), *low_bits.values()]
    what = "the model with its gradients and optimizer"
    ways = max(parallel.weight_parts, parallel.expert) * parallel.tensor * parallel.pipeline
    needed = _bytes(held) // ways
    _check(needed, device, what, "take a smaller model, or a device with more memory")


def _check(n_bytes: int, device: torch.device, what: str, remedy: str) -> None:
    """Refuse what each of the processes that share this device's memory needs."""
    sharers = environment.count_here() if device.type == "cpu" else 1
    if sharers > 1:
        what += f" in {sharers} processes"
        remedy = f"start fewer, divide the weights by parallel.shard, or {remedy}"
    check_fits(sharers * n_bytes, device, what, remedy)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
