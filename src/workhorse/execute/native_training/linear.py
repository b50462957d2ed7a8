"""Linear layers for training on a CPU, with products on its matrix unit or in its vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.native import Operators
from workhorse.native.matrix_unit import Product, rows
from workhorse.native.vectors import Sum
from workhorse.nn.head import Head
from workhorse.nn.products import product
from workhorse.transforms.replace import become, replace_modules

ON_UNIT = {"highest": (torch.bfloat16,), "high": (torch.bfloat16, torch.float32)}
"""The dtypes that the matrix unit multiplies at each precision of float32 gemms."""


class Gemm:
    """Products of matrices, without gradients: by the quickest operators, or by PyTorch.

    Args:
        operators: of the matrix unit and of vectors, those that there are.
        precision: of float32 gemms, `highest` or `high`; see `MatrixUnit.gemm`.
    """

    def __init__(self, operators: Operators, precision: str = "highest") -> None:
        self.products: dict[torch.dtype, Product] = {}
        self.sums: dict[torch.dtype, Callable[[Sequence[Sum]], list[Tensor]]] = {}
        if (vectors := operators.vectors) is not None:
            self.products |= dict.fromkeys((torch.float32, torch.bfloat16), vectors.gemm)
            self.sums |= dict.fromkeys(self.products, vectors.gemms)
        if (unit := operators.matrix_unit) is not None:
            for dtype in ON_UNIT[precision]:
                self.products[dtype] = unit.gemm
                self.sums.pop(dtype, None)

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Whether an operator multiplies these; the rows of a can be made contiguous."""
        known = a.dtype == b.dtype and a.dtype in self.products
        return known and bool(a.numel() and b.numel()) and 1 in b.stride()

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """`a b + bias`.

        Args:
            a: (rows, inner), with rows or columns contiguous.
            b: (inner, columns), likewise.
            bias: (columns).
        """
        if self.takes(a, b):
            return self.products[a.dtype](a, b, bias)
        return product(a, b, bias)

    def together(self, *sums: Sum) -> list[Tensor]:
        """Sums of products that do not need each other, if possible all in one go."""
        pairs = [pair for one in sums for pair in one.pairs]
        dtype = pairs[0][0].dtype
        if dtype in self.sums and all(a.dtype == dtype and self.takes(a, b) for a, b in pairs):
            return self.sums[dtype](sums)
        return [self._sum(one) for one in sums]

    def _sum(self, one: Sum) -> Tensor:
        (a, b), *rest = one.pairs
        total = self(a, b, one.bias)
        for a, b in rest:
            total += self(a, b)
        return total


class NativeLinear(nn.Linear):
    """`nn.Linear` whose gemms, forwards and backwards, are those of `multiply`."""

    multiply: Gemm

    def forward(self, input: Tensor) -> Tensor:
        if self.multiply.takes(input, self.weight):
            (y,) = several_linear(self.multiply, input, [self])
            return y
        return super().forward(input)


def is_plain(linear: nn.Module) -> bool:
    """Whether a module computes `x Wᵀ + bias`, whatever hooks see of it."""
    return type(linear).forward in (nn.Linear.forward, NativeLinear.forward)


def is_plain_in(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """Whether it is plain, and its weights are contiguous and of this dtype."""
    if not is_plain(linear):
        return False
    weights = (linear.weight,) if linear.bias is None else (linear.weight, linear.bias)
    return all(one.dtype == dtype and one.is_contiguous() for one in weights)


def weights_of(linears: Sequence[nn.Linear]) -> list[Tensor | None]:
    """The weight and bias of each."""
    return [weight for linear in linears for weight in (linear.weight, linear.bias)]


def gradients_of_weights(
    multiply: Gemm,
    layers: Sequence[tuple[Tensor, Tensor]],
    wanted: Sequence[bool],
    *others: Sum,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The gradients of the weight and bias of each layer, in the order of `weights_of`.

    Args:
        multiply: the gemm.
        layers: the gradient of each output, and its input; both (rows, width).
        wanted: of what, in the same order.
        others: sums of products that are made in the same go, and returned first.
    """
    for_weights, for_biases = wanted[::2], wanted[1::2]
    sums = [
        Sum([(above.t(), x)])
        for (above, x), learns in zip(layers, for_weights, strict=True)
        if learns
    ]
    made = multiply.together(*others, *sums) if others or sums else []
    of_weights = iter(made[len(others) :])
    gradients: list[Tensor | None] = []
    for (above, _), for_weight, for_bias in zip(layers, for_weights, for_biases, strict=True):
        gradients.append(next(of_weights) if for_weight else None)
        gradients.append(above.sum(dim=0) if for_bias else None)
    return made[: len(others)], gradients


def several_linear(multiply: Gemm, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """What several plain linear layers make of one x, by products made together."""
    return _Linear.apply(x, multiply, *weights_of(linears))


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
    """Several layers that read one x, given the weight and bias of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Gemm, *weights: Tensor | None) -> tuple[Tensor, ...]:
        matrices = [weight for weight in weights[::2] if weight is not None]
        ctx.save_for_backward(x, *matrices)
        ctx.multiply = multiply
        pairs = zip(matrices, weights[1::2], strict=True)
        matrix = rows(x)
        made = multiply.together(*(Sum([(matrix, weight.t())], bias) for weight, bias in pairs))
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        for_x, _, *wanted = ctx.needs_input_grad
        aboves, matrix = [rows(one) for one in above], rows(x)
        of_x = [Sum(list(zip(aboves, matrices, strict=True)))] if for_x else []
        dx, gradients = gradients_of_weights(
            ctx.multiply, [(one, matrix) for one in aboves], wanted, *of_x
        )
        return dx[0].view(x.shape) if for_x else None, None, *gradients
