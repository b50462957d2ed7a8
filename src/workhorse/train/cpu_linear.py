"""Linear layers of bfloat16 that multiply on a CPU's matrix unit, put in from outside."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.native import products


def speed_up_linear(module: nn.Module) -> None:
    """Let every `nn.Linear` in a module that is trained multiply natively."""
    for part in module.modules():
        if type(part) is nn.Linear:
            setattr(part, "forward", functools.partial(_forward, part))  # noqa: B010


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a b + bias` of two matrices, without gradients; where the operator cannot, by PyTorch.

    Args:
        a: (rows, inner), its rows or its columns side by side.
        b: (inner, columns), likewise.
        bias: (columns).
    """
    if a.dtype == b.dtype == torch.bfloat16 and a.numel() and b.numel():
        return products.multiply(a, b, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    if x.dtype == linear.weight.dtype == torch.bfloat16 and x.numel():
        return _Linear.apply(x, linear.weight, linear.bias)
    return F.linear(x, linear.weight, linear.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        gradient = products.rows(above[0])
        return (
            products.multiply(gradient, weight).view(x.shape) if for_x else None,
            products.multiply(gradient.t(), products.rows(x)) if for_weight else None,
            gradient.sum(dim=0) if for_bias else None,
        )
