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
    numbers: Tensor,
    shrink: Tensor,
    constants: Tensor,
) -> None:
    """Update a weight and its state in place.

    All numbers are tensors: with floats PyTorch's compiler made a program for each value, or took
    that of another value from its cache (2.11 and 2.13).

    Args:
        weight: (n,) bfloat16.
        low_bits: (n,) the low 16 bits of its float32 value; see `master_weights.split`.
        mean: (n,) running mean of the gradient, bfloat16 or float32.
        mean_square: (n,) running mean of its square, float32.
        gradient: (n,) of any floating-point dtype.
        numbers: (4,) float32, of this weight's step: see `numbers_of`.
        shrink: () float32, multiplies the gradient; if it is not finite, nothing changes.
        constants: (5,) float32: see `constants_of`.
    """
    beta1, of_gradient, beta2, of_square, eps = constants.unbind()
    learning_rate, kept, correction1, correction2 = numbers.unbind()
    master, skips = join(weight, low_bits), ~shrink.isfinite()
    step = gradient.float() * shrink
    new_mean = mean.float() * beta1 + step * of_gradient
    new_square = mean_square * beta2 + step.square() * of_square
    root = (new_square / correction2).sqrt() + eps
    moved = master * kept - learning_rate / correction1 * new_mean / root
    rounded, lower = split(torch.where(skips, master, moved))
    weight.copy_(rounded)
    low_bits.copy_(lower)
    mean.copy_(torch.where(skips, mean, new_mean.to(mean.dtype)))
    mean_square.copy_(torch.where(skips, mean_square, new_square))


def constants_of(beta1: float, beta2: float, eps: float, device: torch.device) -> Tensor:
    """`beta1`, `1 - beta1`, `beta2`, `1 - beta2` and `eps`, each rounded to float32 once."""
    return torch.tensor([beta1, 1 - beta1, beta2, 1 - beta2, eps], device=device)


def numbers_of(
    updates: list[Tensor], learning_rate: float, kept: float, beta1: float, beta2: float
) -> Tensor:
    """`learning_rate`, `kept`, `1 - beta1 ** updates` and `1 - beta2 ** updates` of each weight.

    Args:
        updates: () each, how many there are with this one.
        learning_rate: after the schedule.
        kept: what a step leaves of the weight, `1 - learning_rate · weight_decay`.
        beta1: decay rate of the mean.
        beta2: decay rate of the mean of squares.

    Returns:
        (weights, 4) float32. A row's address is a multiple of 16 bytes, as the compiler wants it.
    """
    counts = torch.stack(updates).double()
    columns = [torch.full_like(counts, number) for number in (learning_rate, kept)]
    columns += [1 - beta**counts for beta in (beta1, beta2)]
    return torch.stack(columns, dim=1).float()


@cache
def compiled_adamw_() -> Callable[..., None]:
    """`adamw_`, compiled for weights of any size."""
    compiled: Callable[..., None] = torch.compile(adamw_)

    def update(*tensors: Tensor) -> None:
        for tensor in tensors[:5]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors)

    return update
