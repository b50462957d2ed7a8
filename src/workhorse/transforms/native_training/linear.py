"""Linear layers for training on a CPU's matrix unit."""

from typing import Any

import torch
from torch import Tensor, nn

from workhorse.native import MatrixUnit
from workhorse.native.matrix_unit import rows
from workhorse.nn.head import Head
from workhorse.transforms.replace import become, replace_modules

MULTIPLIED = {"highest": (torch.bfloat16,), "high": (torch.bfloat16, torch.float32)}
"""The dtypes that the matrix unit multiplies at each precision of float32 gemms."""


class Gemm:
    """`a b + bias` of two matrices, without gradients: on the matrix unit, or by PyTorch.

    Args:
        unit: the CPU's matrix unit.
        precision: of float32 gemms, `highest` or `high`; see `MatrixUnit.gemm`.
    """

    def __init__(self, unit: MatrixUnit, precision: str = "highest") -> None:
        self.unit = unit
        self.dtypes = MULTIPLIED[precision]

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Whether the unit multiplies these."""
        return a.dtype == b.dtype and a.dtype in self.dtypes and bool(a.numel() and b.numel())

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            a: (rows, inner), with rows or columns contiguous.
            b: (inner, columns), likewise.
            bias: (columns).
        """
        if self.takes(a, b):
            return self.unit.gemm(a, b, bias)
        return a @ b if bias is None else torch.addmm(bias, a, b)


class NativeLinear(nn.Linear):
    """`nn.Linear` whose gemms, forwards and backwards, are those of `multiply`."""

    multiply: Gemm

    def forward(self, input: Tensor) -> Tensor:
        if self.multiply.takes(input, self.weight):
            return _Linear.apply(input, self.weight, self.bias, self.multiply.unit)
        return super().forward(input)


def replace_linear(root: nn.Module, multiply: Gemm) -> nn.Module:
    """Let every `nn.Linear` in a module use `multiply`, except a head's, whose loss multiplies.

    Returns:
        The module, or its replacement if it is a linear layer itself.
    """
    of_heads = {head.proj for head in root.modules() if isinstance(head, Head)}

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is nn.Linear and module not in of_heads:
            return become(module, NativeLinear, multiply=multiply)
        return module

    return replace_modules(root, choose)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, unit: MatrixUnit
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.unit = unit
        return unit.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        gradient, gemm = rows(above[0]), ctx.unit.gemm
        return (
            gemm(gradient, weight).view(x.shape) if for_x else None,
            gemm(gradient.t(), rows(x)) if for_weight else None,
            gradient.sum(dim=0) if for_bias else None,
            None,
        )
