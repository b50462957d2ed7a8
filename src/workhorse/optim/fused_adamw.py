"""AdamW of a bfloat16 weight with its low bits in one compiled loop: `train.compile: true`.

By PyTorch's operators a GPU launches twenty kernels for each weight, and reads and writes its
numbers as often; this reads and writes each once.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from workhorse.optim.master_weights import join, split


def fused_adamw_(  # noqa: PLR0917 - as a compiler is given them
    weight: Tensor,
    low_bits: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    gradient: Tensor,
    updates: Tensor,
    shrink: Tensor,
    rate: Tensor,
    decay: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update a weight and its state in place, unless `shrink` is not finite.

    Args:
        weight: (numbers), bfloat16.
        low_bits: (numbers), of its float32 master.
        mean: (numbers), running, of the gradient, of any dtype.
        mean_square: (numbers), running, of its square, float32.
        gradient: (numbers), of any dtype.
        updates: (), how many there are with this one.
        shrink: (), multiplies the gradient.
        rate: (), of learning.
        decay: (), what a step leaves of the weight.
        beta1: the share of the mean that a step keeps.
        beta2: the same of the mean of squares.
        eps: added to the divisor.
    """
    master, skips = join(weight, low_bits), ~shrink.isfinite()
    step = gradient.float() * shrink
    new_mean = mean.float() * beta1 + step * (1 - beta1)
    new_square = mean_square * beta2 + step.square() * (1 - beta2)
    root = (new_square / (1 - beta2**updates)).sqrt() + eps
    moved = master * decay - rate / (1 - beta1**updates) * new_mean / root
    rounded, lower = split(torch.where(skips, master, moved))
    weight.copy_(rounded)
    low_bits.copy_(lower)
    mean.copy_(torch.where(skips, mean, new_mean.to(mean.dtype)))
    mean_square.copy_(torch.where(skips, mean_square, new_square))


@cache
def compiled_adamw_() -> Callable[..., None]:
    """`fused_adamw_`, compiled for weights of any size."""
    compiled: Callable[..., None] = torch.compile(fused_adamw_)

    def update(*tensors: Tensor, **rest: float) -> None:
        for tensor in tensors[:5]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors, **rest)

    return update
