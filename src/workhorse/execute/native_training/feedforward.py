"""Linear layers and feed-forwards for native training on a CPU.

Activations in bfloat16 are table look-ups, because bfloat16 has only 65,536 values. A feed-forward
is one autograd function. It saves the inputs of the activation, not its outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.activation_names import activation_name
from workhorse.execute.native_training.norms import TYPES
from workhorse.native import Operators, Training, blocks
from workhorse.native.matrix_unit import Product, rows
from workhorse.native.vectors import Sum
from workhorse.nn.embedding import Head
from workhorse.nn.feedforward import Gated, GatedMlp, Mlp
from workhorse.nn.products import product
from workhorse.nn.surgery import as_subclass, has_hooks, replace_modules

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


class NativeLinear(nn.Linear):
    """`nn.Linear` that uses `multiply` for the gemms of the forward and the backward pass."""

    multiply: Gemm

    def forward(self, input: Tensor) -> Tensor:
        if self.multiply.takes(input, self.weight):
            (y,) = several_linear(self.multiply, input, [self])
            return y
        return super().forward(input)


def is_plain(linear: nn.Module) -> bool:
    """True if the forward method of a module computes only `x Wᵀ + bias`. Hooks are ignored."""
    return type(linear).forward in (nn.Linear.forward, NativeLinear.forward)


def is_plain_in(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """True if a layer computes only `x Wᵀ + bias`, with contiguous weights of this dtype."""
    if not is_plain(linear):
        return False
    weights = (linear.weight,) if linear.bias is None else (linear.weight, linear.bias)
    return all(one.dtype == dtype and one.is_contiguous() for one in weights)


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


def several_linear(multiply: Gemm, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Compute the outputs of several linear layers that have the same input x, in one call."""
    return _Linear.apply(x, multiply, *weights_of(linears))


def replace_linear(root: nn.Module, multiply: Gemm) -> nn.Module:
    """Make every `nn.Linear` in a module use `multiply`, except heads.

    The loss computes the matmul of a head.

    Returns:
        The module, or its replacement if it is a linear layer itself.
    """
    of_heads = {head.proj for head in root.modules() if isinstance(head, Head)}

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is nn.Linear and module not in of_heads:
            return as_subclass(module, NativeLinear, multiply=multiply)
        return module

    return replace_modules(root, choose)


class _Linear(torch.autograd.Function):
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


def _computes(native: blocks.Activation, module: nn.Module) -> bool:
    """True if `native` still computes the activation `module`, which may have been replaced."""
    return native.name == activation_name(module)


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


class NativeGated(Gated):
    """`Gated` computed by a native operator."""

    native: blocks.Activation
    operators: Training

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        alike = gate.dtype == up.dtype and gate.shape == up.shape
        known = _computes(self.native, self.activation) and not has_hooks(self.activation)
        if not alike or gate.dtype not in TYPES or not known:
            return super().forward(gate, up)
        return _Activation.apply(gate, up, self.native, self.operators)


class Simple(NamedTuple):
    """A feed-forward of only linear layers and an activation: no dropout, inner norm or hooks."""

    act: blocks.Activation
    operators: Training
    linears: Sequence[nn.Linear]
    """The down projection, then the one or two projections of the input x."""


class NativeMlp(Mlp):
    """`Mlp` that runs as one autograd function with native operators, if they support it."""

    native: blocks.Activation
    operators: Training
    multiply: Gemm

    def forward(self, x: Tensor) -> Tensor:
        simple = self.simple(x)
        return super().forward(x) if simple is None else _feed_forward(x, simple, self.multiply)

    def simple(self, x: Tensor) -> Simple | None:
        """The parts of this feed-forward if it has no others and the operators accept x."""
        linears = self.down_proj, self.up_proj
        between = self.dropout, self.inner_norm
        if not _is_simple(x, linears, between) or not _computes(self.native, self.activation):
            return None
        if has_hooks(*linears, *between, self.activation):
            return None
        return Simple(self.native, self.operators, linears)


class NativeGatedMlp(GatedMlp):
    """`GatedMlp` that runs as one autograd function with native operators, if they support it."""

    multiply: Gemm

    def forward(self, x: Tensor) -> Tensor:
        simple = self.simple(x)
        return super().forward(x) if simple is None else _feed_forward(x, simple, self.multiply)

    def simple(self, x: Tensor) -> Simple | None:
        """The parts of this feed-forward if it has no others and the operators accept x."""
        linears = self.down_proj, self.gate_proj, self.up_proj
        between = self.dropout, self.inner_norm
        gated = self.activation
        if (
            not isinstance(gated, NativeGated)
            or not _computes(gated.native, gated.activation)
            or not _is_simple(x, linears, between)
            or has_hooks(*linears, *between, gated, gated.activation)
        ):
            return None
        return Simple(gated.native, gated.operators, linears)


def replace_feed_forwards(
    root: nn.Module, multiply: Gemm, operators: Training, rounded_from: Training | None = None
) -> nn.Module:
    """Make the feed-forwards in a module use native operators, if they support the activation.

    For `rounded_from`, see `activation_of`.

    Returns:
        The module, or its replacement if it is a feed-forward itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is GatedMlp:
            return as_subclass(module, NativeGatedMlp, multiply=multiply)
        if type(module) is Gated and (native := activation_of(module.activation, rounded_from)):
            return as_subclass(module, NativeGated, native=native, operators=operators)
        if type(module) is Mlp and (native := activation_of(module.activation, rounded_from)):
            return as_subclass(
                module, NativeMlp, native=native, operators=operators, multiply=multiply
            )
        return module

    return replace_modules(root, choose)


def _is_simple(x: Tensor, linears: Sequence[nn.Linear], between: Sequence[nn.Module]) -> bool:
    """True if the operators support x and the submodules of a feed-forward.

    Args:
        x: the input.
        linears: the linear layers.
        between: dropout and norms between them; they must be identities.
    """
    return (
        x.dtype in TYPES
        and all(type(part) is nn.Identity for part in between)
        and all(is_plain_in(linear, x.dtype) for linear in linears)
    )


def _feed_forward(x: Tensor, simple: Simple, multiply: Gemm) -> Tensor:
    act, operators, linears = simple
    return _FeedForward.apply(x, act, operators, multiply, *weights_of(linears))


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


class _FeedForward(torch.autograd.Function):
    """A feed-forward with gradients: `down(act(first(x)))` or `down(act(first(x)) · second(x))`.

    `weights` are the weight and bias of down, first and, if gated, second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        act: blocks.Activation,
        operators: Training,
        multiply: Gemm,
        *weights: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        (down, down_bias), *branches = _pairs(weights)
        hidden = multiply.together(*(Sum([(rows, weight.t())], bias) for weight, bias in branches))
        learns = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(rows if learns else None, *weights, *hidden)
        ctx.act, ctx.operators, ctx.multiply = act, operators, multiply
        y = multiply(operators.activation(*_two(hidden), act), down.t(), down_bias)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        count = (len(saved) - 2) // 3  # branches; each saved a weight, a bias and its output
        (down, _), *branches = _pairs(saved[:-count])
        hidden = saved[-count:]
        dy = above[0].reshape(-1, above[0].shape[-1]).contiguous()
        y, *slopes = ctx.operators.activation_backward(
            ctx.multiply(dy, down, None), *_two(hidden), ctx.act
        )
        weights = [weight for weight, _ in branches]
        (dx,), gradients = gradients_of_weights(
            ctx.multiply,
            [(dy, y), *((slope, dy if rows is None else rows) for slope in slopes)],
            ctx.needs_input_grad[4:],
            Sum(list(zip(slopes, weights, strict=True))),
        )
        return dx.view(above[0].shape), None, None, None, *gradients


def _pairs(weights: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """Pair each weight with the bias after it."""
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


def _two(hidden: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return hidden[0], hidden[1] if len(hidden) > 1 else None
