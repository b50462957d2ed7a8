"""Whether training fits into memory, before anything is allocated."""

from collections.abc import Iterable

import torch
from torch import Tensor

from workhorse.devices import training_dtype
from workhorse.memory import check_fits
from workhorse.nn import Decoder, DecoderConfig
from workhorse.optim.groups import build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.train.recipe.recipe import TrainConfig


def held_memory(decoder: Decoder, train: TrainConfig, device: torch.device) -> dict[str, int]:
    """Bytes of `weights`, `gradients`, `optimizer` and `sums` while a decoder is trained.

    `sums` are the float32 gradients accumulated over micro-batches.

    Args:
        decoder: on the meta device; its weights are cast to the dtype that they are trained in.
        train: how it is trained.
        device: where it is trained.
    """
    narrow = training_dtype(train.dtype, device) == torch.bfloat16
    low_bits = round_weights(decoder) if narrow else {}
    optimizer = build_optimizer(decoder, train.optimizer, low_bits)
    learning = [weight for weight in decoder.parameters() if weight.requires_grad]
    return {
        "weights": _bytes(decoder.parameters()),
        "gradients": _bytes(learning),
        "optimizer": _bytes([*optimizer.tensors().values(), *low_bits.values()]),
        "sums": 4 * sum(weight.numel() for weight in low_bits.values()),
    }


def check_training(config: DecoderConfig, train: TrainConfig, device: torch.device) -> None:
    """Refuse to train if weights, gradients and optimizer alone do not fit into memory.

    Raises:
        WorkhorseError: they do not fit.
    """
    needed = held_memory(config.build(train.kernel, device="meta"), train, device)
    del needed["sums"]
    what = "the model with its gradients and optimizer"
    remedy = "take a smaller model, or a device with more memory"
    check_fits(sum(needed.values()), device, what, remedy)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
