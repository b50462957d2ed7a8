"""The operators of training on a CPU; see `training.cpp`.

They are compiled apart from those of decoding: a run needs them from its first step on, or its end
would depend on when they were there.
"""

import os
from functools import cache

import torch
from torch import Tensor

from workhorse.devices import cpu_has
from workhorse.native import build


def why_not() -> str | None:
    """Why the operators cannot be called, in one line, or None if they can.

    They are compiled if that was never done on this machine, which takes some seconds.
    """
    if os.environ.get(build.SWITCH) == "0":
        return f"{build.SWITCH}=0"
    return _load()


def loaded() -> bool:
    """Whether the operators can be called."""
    return hasattr(torch.ops.workhorse, "split_adamw_")


def multiplies_tiles() -> bool:
    """Whether the CPU has the matrix instructions that `attention_backward` is written in."""
    return cpu_has("amx_bf16")


def attention_backward(  # noqa: PLR0917 - the tensors of one formula
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    gradient: Tensor,
    normaliser: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `y = softmax(q kᵀ · scale) v` with respect to q, k and v.

    Args:
        q: (batch, heads, seq, head_dim), bfloat16, seq and head_dim even, rows contiguous.
        k: likewise.
        v: likewise.
        y: likewise.
        gradient: of y, likewise.
        normaliser: (batch, heads, seq) log of the sum of the exponentials, float32.
        scale: multiplies the scores.
        causal: whether a query sees no later key.
    """
    operator = torch.ops.workhorse.attention_backward.default
    return operator(q, k, v, y, gradient, normaliser, scale, causal)


def split_adamw_(
    weight: Tensor,
    remainder: Tensor,
    gradient: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    *,
    shrink: float,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    updates: int,
) -> None:
    """An update of AdamW, in place, of weights as `workhorse.train.masters` splits them.

    Args:
        weight: bfloat16.
        remainder: int16.
        gradient: bfloat16 or float32; multiplied by `shrink`.
        mean: float32.
        mean_square: float32.
        shrink: see gradient.
        rate: of learning.
        beta1: see AdamW.
        beta2: see AdamW.
        eps: see AdamW.
        weight_decay: see AdamW.
        updates: so far, this one included.
    """
    torch.ops.workhorse.split_adamw_.default(
        weight,
        remainder,
        gradient,
        mean,
        mean_square,
        shrink,
        rate,
        beta1,
        beta2,
        eps,
        weight_decay,
        updates,
    )


@cache
def _load() -> str | None:
    try:
        torch.ops.load_library(build.ensure("training", wait=True))
    except build.Unavailable as reason:
        return str(reason)
    except OSError as error:
        return f"cannot load training.so: {error}".splitlines()[0]
    torch.library.register_fake("workhorse::attention_backward", _gradient_shapes)
    return None


def _gradient_shapes(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
            1, 2
        )

    return like(q), like(k), like(v)
