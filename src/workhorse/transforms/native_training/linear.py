"""Linear layers for training on a CPU, with products on its matrix unit or in its vectors."""

from typing import Any

import torch
from torch import Tensor, nn

from workhorse.native import Operators
from workhorse.native.matrix_unit import Product, linear, rows
from workhorse.nn.head import Head
from workhorse.nn.head_loss import product
from workhorse.transforms.replace import become, replace_modules

ON_UNIT = {"highest": (torch.bfloat16,), "high": (torch.bfloat16, torch.float32)}
"""The dtypes that the matrix unit multiplies at each precision of float32 gemms."""


class Gemm:
    """`a b + bias` of two matrices, without gradients: by the quickest operator, or by PyTorch.

    Args:
        operators: of the matrix unit and of vectors, those that there are.
        precision: of float32 gemms, `highest` or `high`; see `MatrixUnit.gemm`.
    """

    def __init__(self, operators: Operators, precision: str = "highest") -> None:
        self.products: dict[torch.dtype, Product] = {}
        if (vectors := operators.vectors) is not None:
            self.products[torch.float32] = vectors.gemm
        if (unit := operators.matrix_unit) is not None:
            self.products |= dict.fromkeys(ON_UNIT[precision], unit.gemm)

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Whether an operator multiplies these."""
        return a.dtype == b.dtype and a.dtype in self.products and bool(a.numel() and b.numel())

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            a: (rows, inner), with rows or columns contiguous.
            b: (inner, columns), likewise.
            bias: (columns).
        """
        if self.takes(a, b):
            return self.products[a.dtype](a, b, bias)
        return product(a, b, bias)


class NativeLinear(nn.Linear):
    """`nn.Linear` whose gemms, forwards and backwards, are those of `multiply`."""

    multiply: Gemm

    def forward(self, input: Tensor) -> Tensor:
        if self.multiply.takes(input, self.weight):
            of_dtype = self.multiply.products[input.dtype]
            return _Linear.apply(input, self.weight, self.bias, of_dtype)
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm = gemm
        return linear(gemm, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        gradient, gemm = rows(above[0]), ctx.gemm
        return (
            gemm(gradient, weight, None).view(x.shape) if for_x else None,
            gemm(gradient.t(), rows(x), None) if for_weight else None,
            gradient.sum(dim=0) if for_bias else None,
            None,
        )
