"""Linear layers and activations for native training on a CPU.

Activations in bfloat16 are table look-ups, because bfloat16 has only 65,536 values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.activation_names import activation_name
from workhorse.execute.body import NativeModule
from workhorse.execute.native_training.norms import TYPES
from workhorse.native import Operators, Training, blocks
from workhorse.native.matrix_unit import Product, rows
from workhorse.native.vectors import Sum
from workhorse.nn.feedforward import Gated
from workhorse.nn.products import product
from workhorse.nn.surgery import HookWatch

ON_UNIT = {"highest": (torch.bfloat16,), "high": (torch.bfloat16, torch.float32)}
"""The dtypes that the matrix unit multiplies, by the precision that is set for float32 gemms."""


class Gemm:
    """Matmuls without gradients, computed by the fastest available operator or by PyTorch.

    Args:
        operators: the native operators; only `matrix_unit` and `vectors` are used.
        precision: the precision of float32 gemms, `highest` or `high`; see `MatrixUnit.gemm`.
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
        """True if a native operator can compute the matmul `a b`; a need not be contiguous."""
        known = a.dtype == b.dtype and a.dtype in self.products
        return known and bool(a.numel() and b.numel()) and 1 in b.stride()

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `a b + bias`.

        Args:
            a: (rows, inner).
            b: (inner, columns), with rows or columns contiguous.
            bias: (columns).
        """
        if self.takes(a, b):
            return self.products[a.dtype](a if 1 in a.stride() else a.contiguous(), b, bias)
        return product(a, b, bias)

    def together(self, *sums: Sum) -> list[Tensor]:
        """Compute several independent sums of matmuls, in one native call if possible."""
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


class NativeLinear(NativeModule, nn.Linear):
    """`nn.Linear` that uses `multiply` for the gemms of the forward and the backward pass."""

    multiply: Gemm

    def forward(self, input: Tensor) -> Tensor:
        if self.multiply.takes(input, self.weight):
            (y,) = Linears.apply(input, self.multiply, self.weight, self.bias)
            return y
        return super().forward(input)


def contiguous_rows(x: Tensor) -> Tensor:
    """Reshape (…, width) to a contiguous matrix (rows, width); copy only if needed."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def weights_of(linears: Sequence[nn.Linear]) -> list[Tensor | None]:
    """Return the weight and bias of each layer in turn: weight, bias, weight, bias …."""
    return [weight for linear in linears for weight in (linear.weight, linear.bias)]


def gradients_of_weights(
    multiply: Gemm,
    layers: Sequence[tuple[Tensor, Tensor]],
    wanted: Sequence[bool],
    *others: Sum,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Compute the gradients of the weights and biases of several linear layers.

    Args:
        multiply: the gemm.
        layers: for each layer, the gradient of its output, and its input; both (rows, width).
        wanted: for each weight and bias, in the order of `weights_of`: True if its gradient is
            needed.
        others: further sums of matmuls to compute in the same call.

    Returns:
        The results of `others`; and the gradients in the order of `weights_of`, None if not needed.
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


class Linears(torch.autograd.Function):
    """`x Wᵀ + b` for each pair of W and b in `weights`, in one call, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Gemm, *weights: Tensor | None) -> tuple[Tensor, ...]:
        matrices = [weight for weight in weights[::2] if weight is not None]
        learns = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(x if learns else None, *matrices)
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
        aboves = [rows(one) for one in above]
        inputs = aboves if x is None else [rows(x)] * len(aboves)  # not read if all is frozen
        of_x = [Sum(list(zip(aboves, matrices, strict=True)))] if for_x else []
        dx, gradients = gradients_of_weights(
            ctx.multiply, list(zip(aboves, inputs, strict=True)), wanted, *of_x
        )
        shape = (*above[0].shape[:-1], matrices[0].shape[1])
        return dx[0].view(shape) if for_x else None, None, *gradients


def activation_of(
    module: nn.Module, rounded_from: Training | None = None
) -> blocks.Activation | None:
    """Convert an activation module to the operators' format; None if they do not support it.

    Args:
        module: the activation.
        rounded_from: operators whose float32 activation gives the values for bfloat16, as in a
            decoding step; None: each value is rounded once.
    """
    name = activation_name(module)
    return blocks.Activation(name, _table_of(module, name, rounded_from)) if name else None


@torch.enable_grad()
def _table_of(
    activation: nn.Module, name: blocks.ActivationName, rounded_from: Training | None
) -> Tensor:
    """Tabulate an activation and its derivative; see `ops/activations.h`."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).double().requires_grad_()
    value = activation(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    if rounded_from is not None:
        without_table = blocks.Activation(name, torch.empty(0, dtype=torch.int32))
        value = rounded_from.activation(x.detach().float(), None, without_table).double()
    both = torch.stack((value.detach(), slope), dim=1).to(torch.bfloat16)
    return both.view(torch.int32).flatten()


class NativeGated(NativeModule, Gated):
    """`Gated` computed by a native operator."""

    native: blocks.Activation
    operators: Training
    watch: HookWatch
    known: tuple[nn.Module]
    """The activation that `native` computes; the module may have another one later."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        alike = gate.dtype == up.dtype and gate.shape == up.shape
        changed = self.activation is not self.known[0] or self.watch.sees_hooks
        if not alike or gate.dtype not in TYPES or changed:
            return super().forward(gate, up)
        return _Activation.apply(gate, up, self.native, self.operators)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, act: blocks.Activation, operators: Training
    ) -> Tensor:
        x, up = x.contiguous(), up.contiguous()
        ctx.save_for_backward(x, up)
        ctx.act, ctx.operators = act, operators
        return operators.activation(x, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        _, dx, dup = ctx.operators.activation_backward(above[0].contiguous(), x, up, ctx.act)
        return dx, dup, None, None


class ActDown(torch.autograd.Function):
    """`down(act(first))` or `down(act(first) · second)`; it saves the inputs of the activation."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        first: Tensor,
        second: Tensor | None,
        act: blocks.Activation,
        operators: Training,
        multiply: Gemm,
        down: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        shape = first.shape[:-1]
        first, second = contiguous_rows(first), None if second is None else contiguous_rows(second)
        ctx.save_for_backward(first, second, down)
        ctx.act, ctx.operators, ctx.multiply = act, operators, multiply
        y = multiply(operators.activation(first, second, act), down.t(), bias)
        return y.view(*shape, y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        first, second, down = ctx.saved_tensors
        dy = contiguous_rows(above[0])
        y, *slopes = ctx.operators.activation_backward(
            ctx.multiply(dy, down, None), first, second, ctx.act
        )
        _, gradients = gradients_of_weights(ctx.multiply, [(dy, y)], ctx.needs_input_grad[5:])
        shape = above[0].shape[:-1]
        dfirst, dsecond = ([one.view(*shape, one.shape[1]) for one in slopes] + [None])[:2]
        return dfirst, dsecond, None, None, None, *gradients
