"""AdamW of a bfloat16 weight with its low bits in one compiled loop: `train.compile: true`.

With PyTorch's operators a GPU launches twenty kernels for each weight, and reads and writes its
numbers as often; this reads and writes each once.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from workhorse.optim.master_weights import join, split


def adamw_(  # noqa: PLR0917 - tensors by position, so that their sizes can be marked as varying
    weight: Tensor,
    low_bits: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    gradient: Tensor,
    updates: Tensor,
    shrink: Tensor,
    learning_rate: Tensor,
    kept: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update a weight and its state in place.

    Args:
        weight: (n,) bfloat16.
        low_bits: (n,) the low 16 bits of its float32 value; see `master_weights.split`.
        mean: (n,) running mean of the gradient, bfloat16 or float32.
        mean_square: (n,) running mean of its square, float32.
        gradient: (n,) of any floating-point dtype.
        updates: () float32, the number of updates, this one included.
        shrink: () float32, multiplies the gradient; if it is not finite, nothing changes.
        learning_rate: () float32, after the schedule.
        kept: () float32, `1 - learning_rate · weight_decay`.
        beta1: decay rate of the mean.
        beta2: decay rate of the mean of squares.
        eps: added to the denominator.
    """
    master, skips = join(weight, low_bits), ~shrink.isfinite()
    step = gradient.float() * shrink
    new_mean = mean.float() * beta1 + step * (1 - beta1)
    new_square = mean_square * beta2 + step.square() * (1 - beta2)
    root = (new_square / (1 - beta2**updates)).sqrt() + eps
    moved = master * kept - learning_rate / (1 - beta1**updates) * new_mean / root
    rounded, lower = split(torch.where(skips, master, moved))
    weight.copy_(rounded)
    low_bits.copy_(lower)
    mean.copy_(torch.where(skips, mean, new_mean.to(mean.dtype)))
    mean_square.copy_(torch.where(skips, mean_square, new_square))


@cache
def compiled_adamw_() -> Callable[..., None]:
    """`adamw_`, compiled for weights of any size."""
    compiled: Callable[..., None] = torch.compile(adamw_)

    def update(*tensors: Tensor, **rest: float) -> None:
        for tensor in tensors[:5]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors, **rest)

    return update
