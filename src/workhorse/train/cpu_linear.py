"""Linear layers that multiply on a CPU's matrix unit, put in from outside."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.native import products

DTYPES = {"highest": (torch.bfloat16,), "high": (torch.bfloat16, torch.float32)}
"""What the matrix unit multiplies at each precision of float32 products."""


class Products:
    """`a b + bias` of two matrices, without gradients: on the matrix unit, or by PyTorch.

    Args:
        precision: of float32 products, `highest` or `high`; see `products.multiply`.
    """

    def __init__(self, precision: str = "highest") -> None:
        self.dtypes = DTYPES[precision]

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Whether the unit is used for these."""
        return a.dtype == b.dtype and a.dtype in self.dtypes and bool(a.numel() and b.numel())

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            a: (rows, inner), its rows or its columns side by side.
            b: (inner, columns), likewise.
            bias: (columns).
        """
        if self.takes(a, b):
            return products.multiply(a, b, bias)
        return a @ b if bias is None else torch.addmm(bias, a, b)


def speed_up_linear(module: nn.Module, multiply: Products) -> None:
    """Let every `nn.Linear` in a module that is trained multiply so."""
    for part in module.modules():
        if type(part) is nn.Linear:
            setattr(part, "forward", functools.partial(_forward, part, multiply))  # noqa: B010


def _forward(linear: nn.Linear, multiply: Products, x: Tensor) -> Tensor:
    if multiply.takes(x, linear.weight):
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
