"""Feed-forwards for training on a CPU with native operators.

Activations of bfloat16 are looked up: there are 65,536 numbers. A feed-forward is one autograd
function, which saves the inputs of the activation and not its outputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.activation_names import activation_name
from workhorse.execute.native_training.linear import (
    Gemm,
    gradients_of_weights,
    is_plain_in,
    weights_of,
)
from workhorse.execute.native_training.norms import TYPES
from workhorse.native import Training, blocks
from workhorse.native.vectors import Sum
from workhorse.nn.feedforward import Gated, GatedMlp, Mlp
from workhorse.nn.watched import watched
from workhorse.transforms.replace import become, replace_modules


def activation_of(module: nn.Module) -> blocks.Activation | None:
    """An activation as the operators know it, or None."""
    name = activation_name(module)
    return blocks.Activation(name, _table_of(module)) if name else None


@torch.enable_grad()
def _table_of(activation: nn.Module) -> Tensor:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).double().requires_grad_()
    value = activation(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    both = torch.stack((value.detach(), slope), dim=1).to(torch.bfloat16)
    return both.view(torch.int32).flatten()


class NativeGated(Gated):
    """`Gated` by a native operator."""

    native: blocks.Activation
    operators: Training

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        alike = gate.dtype == up.dtype and gate.shape == up.shape
        if not alike or gate.dtype not in TYPES or watched(self.activation):
            return super().forward(gate, up)
        return _Activation.apply(gate, up, self.native, self.operators)


class Simple(NamedTuple):
    """A feed-forward that is two or three plain linear layers and an activation, and no more."""

    act: blocks.Activation
    operators: Training
    linears: Sequence[nn.Linear]
    """The last one, then the first ones."""


class NativeMlp(Mlp):
    """`Mlp` as one autograd function."""

    native: blocks.Activation
    operators: Training
    multiply: Gemm

    def forward(self, x: Tensor) -> Tensor:
        simple = self.simple(x)
        return super().forward(x) if simple is None else _feed_forward(x, simple, self.multiply)

    def simple(self, x: Tensor) -> Simple | None:
        """What to compute for x, if no more is to be done."""
        linears = self.down_proj, self.up_proj
        between = self.dropout, self.inner_norm
        if not _is_simple(x, linears, between) or watched(*linears, *between, self.activation):
            return None
        return Simple(self.native, self.operators, linears)


class NativeGatedMlp(GatedMlp):
    """`GatedMlp` as one autograd function."""

    multiply: Gemm

    def forward(self, x: Tensor) -> Tensor:
        simple = self.simple(x)
        return super().forward(x) if simple is None else _feed_forward(x, simple, self.multiply)

    def simple(self, x: Tensor) -> Simple | None:
        """What to compute for x, if no more is to be done."""
        linears = self.down_proj, self.gate_proj, self.up_proj
        between = self.dropout, self.inner_norm
        gated = self.activation
        if (
            not isinstance(gated, NativeGated)
            or not _is_simple(x, linears, between)
            or watched(*linears, *between, gated, gated.activation)
        ):
            return None
        return Simple(gated.native, gated.operators, linears)


def replace_feed_forwards(root: nn.Module, multiply: Gemm, operators: Training) -> nn.Module:
    """Let the feed-forwards in a module use native operators, if these know the activation.

    Args:
        root: the module.
        multiply: the gemm.
        operators: of training.

    Returns:
        The module, or its replacement if it is a feed-forward itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is GatedMlp:
            return become(module, NativeGatedMlp, multiply=multiply)
        if type(module) is Gated and (native := activation_of(module.activation)):
            return become(module, NativeGated, native=native, operators=operators)
        if type(module) is Mlp and (native := activation_of(module.activation)):
            return become(module, NativeMlp, native=native, operators=operators, multiply=multiply)
        return module

    return replace_modules(root, choose)


def _is_simple(x: Tensor, linears: Sequence[nn.Linear], between: Sequence[nn.Module]) -> bool:
    """Whether this is two or three plain linear layers and an activation, and nothing else."""
    return (
        x.dtype in TYPES
        and all(isinstance(part, nn.Identity) for part in between)
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
    """`down(act(first(x)))` or `down(act(first(x)) · second(x))`, given weights and biases."""

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
        ctx.save_for_backward(rows, *weights, *hidden)
        ctx.act, ctx.operators, ctx.multiply = act, operators, multiply
        y = multiply(operators.activation(*_two(hidden), act), down.t(), down_bias)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        count = (len(saved) - 2) // 3  # of branches; each has a weight, a bias and what it gave
        (down, _), *branches = _pairs(saved[:-count])
        hidden = saved[-count:]
        dy = above[0].reshape(rows.shape).contiguous()
        y, *slopes = ctx.operators.activation_backward(
            ctx.multiply(dy, down, None), *_two(hidden), ctx.act
        )
        weights = [weight for weight, _ in branches]
        (dx,), gradients = gradients_of_weights(
            ctx.multiply,
            [(dy, y), *((slope, rows) for slope in slopes)],
            ctx.needs_input_grad[4:],
            Sum(list(zip(slopes, weights, strict=True))),
        )
        return dx.view(above[0].shape), None, None, None, *gradients


def _pairs(weights: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """Each weight with its bias."""
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


def _two(hidden: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return hidden[0], hidden[1] if len(hidden) > 1 else None
