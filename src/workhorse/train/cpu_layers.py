"""Norms and feed-forwards on a CPU with native operators, put in from outside.

A norm is one pass over its rows each way, with the residual sums beside it. An activation of
bfloat16 is looked up: there are 65,536 numbers. A feed-forward is one step of autograd, which keeps
what goes into the activation and not what comes out. Other types than bfloat16 and float32 are left
to PyTorch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workhorse.native import training
from workhorse.nn.blocks import PreNorm
from workhorse.nn.cache import KeyValueEntry
from workhorse.nn.context import Context
from workhorse.nn.feedforward import Gated, GatedMlp, Mlp, ReluSquared
from workhorse.nn.head_loss import Multiply, product
from workhorse.nn.norms import (
    Float32LayerNorm,
    LayerNorm,
    LowPrecisionLayerNorm,
    RMSNorm,
    RMSNormMultipliedFirst,
)
from workhorse.train.masters import look_up

_TYPES = (torch.bfloat16, torch.float32)
_NORMS = (LayerNorm, Float32LayerNorm, LowPrecisionLayerNorm, RMSNorm, RMSNormMultipliedFirst)


def speed_up_layers(module: nn.Module, multiply: Multiply = product) -> None:
    """Let norms and feed-forwards in a module that is trained use native operators.

    Args:
        module: what is trained.
        multiply: two matrices.
    """
    for part in module.modules():
        if type(part) in _NORMS:
            _replace(part, _norm)
        elif type(part) is PreNorm:
            _replace(part, _pre_norm)
        elif isinstance(part, nn.Embedding):
            _replace(part, look_up)
        elif isinstance(part, Mlp) and (act := activation_of(part.activation)):
            _replace(part, _mlp, act, multiply)
        elif isinstance(part, Gated) and (act := activation_of(part.activation)):
            _replace(part, _gated, act)
        elif (
            isinstance(part, GatedMlp)
            and type(part.activation) is Gated
            and (act := activation_of(part.activation.activation))
        ):
            _replace(part, _gated_mlp, act, multiply)


def _replace(module: nn.Module, forward: Callable[..., Tensor], *given: object) -> None:
    setattr(module, "forward", functools.partial(forward, module, *given))  # noqa: B010


def _plain(module: nn.Module, *given: Tensor) -> Tensor:
    """What the module would give had nothing been replaced."""
    return type(module).forward(module, *given)


def activation_of(module: nn.Module) -> training.Activation | None:
    """As the operators know it, or None: one with weights has no fixed image of a number."""
    names: dict[type[nn.Module], training.ActivationName] = {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Sigmoid: "sigmoid",
        ReluSquared: "relu_squared",
    }
    name = names.get(type(module))
    if type(module) is nn.GELU:
        name = "gelu" if module.approximate == "none" else "gelu_tanh"
    return training.Activation(name, _table_of(module)) if name else None


@torch.enable_grad()
def _table_of(activation: nn.Module) -> Tensor:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).double().requires_grad_()
    value = activation(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    halves = torch.stack((value.detach(), slope), dim=1).to(torch.bfloat16)
    return halves.view(torch.int32).flatten()


class _NormOptions(NamedTuple):
    """What the operators are told of a norm beside its weights."""

    offset: float
    eps: float
    centred: bool
    rounded: bool


def _norm(module: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
    if not _takes(x):
        return _plain(module, x)
    return _Norm.apply(x, *_parts(module))


def _takes(x: Tensor) -> bool:
    return x.dtype in _TYPES and not torch.is_autocast_enabled(x.device.type)


def _parts(norm: LayerNorm | RMSNorm) -> tuple[Tensor | None, Tensor | None, _NormOptions]:
    """Weight, bias and options of a norm, rounded where its own forward rounds.

    A LayerNorm of any precision sums in float32 and rounds its result, as PyTorch's kernels do.
    """
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    weight, offset = norm.weight, norm.offset
    if weight is not None and offset and type(norm) is not RMSNormMultipliedFirst:
        weight, offset = weight + offset, 0.0
    centred, rounded = isinstance(norm, LayerNorm), type(norm) is RMSNorm
    return weight, bias, _NormOptions(offset, norm.eps, centred, rounded)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: _NormOptions,
    ) -> Tensor:
        x = x.contiguous()
        y, moments = training.norm(x, weight, bias, **options._asdict())
        ctx.save_for_backward(x, moments, weight, bias)
        ctx.offset, ctx.centred = options.offset, options.centred
        return y

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return _norm_gradients(ctx, above[0], None)


def _norm_gradients(ctx: Any, above: Tensor, other: Tensor | None) -> tuple[Tensor | None, ...]:
    x, moments, weight, bias = ctx.saved_tensors
    dx, sums = training.norm_backward(
        above.contiguous(), x, moments, weight, other, offset=ctx.offset, centred=ctx.centred
    )
    of_weight = None if weight is None else sums[0].to(weight.dtype)
    of_bias = None if bias is None else sums[1].to(bias.dtype)
    return dx, of_weight, of_bias, None


def _pre_norm(
    block: PreNorm, x: Tensor, context: Context | None = None, cache: KeyValueEntry | None = None
) -> Tensor:
    norms = (block.attention_norm, block.feed_forward_norm)
    if (
        not _takes(x)
        or not isinstance(block.attention_branch, nn.Identity)
        or not isinstance(block.feed_forward_branch, nn.Identity)
        or not all(type(norm) in _NORMS for norm in norms)
    ):
        return PreNorm.forward(block, x, context, cache)
    x, y = _add_norm(norms[0], x, None)
    x, y = _add_norm(norms[1], x, block.attention(y, context, cache))
    return x + block.feed_forward(y)


def _add_norm(norm: nn.Module, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, LayerNorm | RMSNorm)
    return _AddNorm.apply(x, branch, *_parts(norm))


class _AddNorm(torch.autograd.Function):
    """`x + branch`, or x, and its norm: their gradients meet in one pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: _NormOptions,
    ) -> tuple[Tensor, Tensor]:
        total, told = x.contiguous(), options._asdict()
        if branch is None:
            y, moments = training.norm(total, weight, bias, **told)
        else:
            total, y, moments = training.add_norm(total, branch.contiguous(), weight, bias, **told)
        ctx.save_for_backward(total, moments, weight, bias)
        ctx.offset, ctx.centred, ctx.joins = options.offset, options.centred, branch is not None
        return total, y

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        along, into_norm = above
        dx, *others = _norm_gradients(ctx, into_norm, along.contiguous())
        return dx, dx if ctx.joins else None, *others


def _gated(module: Gated, act: training.Activation, gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype == up.dtype and gate.dtype in _TYPES and gate.shape == up.shape:
        return _Activation.apply(gate, up, act)
    return _plain(module, gate, up)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, act: training.Activation) -> Tensor:
        x, up = x.contiguous(), up.contiguous()
        ctx.save_for_backward(x, up)
        ctx.act = act
        return training.activation(x, up, act)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        _, dx, dup = training.activation_backward(above[0].contiguous(), x, up, ctx.act)
        return dx, dup, None


def _mlp(module: Mlp, act: training.Activation, multiply: Multiply, x: Tensor) -> Tensor:
    linears = (module.down_proj, module.up_proj)
    if not _is_simple(x, (module.dropout, module.inner_norm), *linears):
        return _plain(module, x)
    return _FeedForward.apply(x, act, multiply, *_weights(*linears))


def _gated_mlp(module: GatedMlp, act: training.Activation, multiply: Multiply, x: Tensor) -> Tensor:
    linears = (module.down_proj, module.gate_proj, module.up_proj)
    if not _is_simple(x, (module.dropout, module.inner_norm), *linears):
        return _plain(module, x)
    return _FeedForward.apply(x, act, multiply, *_weights(*linears))


def _is_simple(x: Tensor, options: Sequence[nn.Module], *linears: nn.Module) -> bool:
    return (
        all(isinstance(option, nn.Identity) for option in options)
        and all(type(linear) is nn.Linear for linear in linears)
        and x.dtype in _TYPES
        and all(linear.weight.dtype == x.dtype for linear in linears)
    )


def _weights(*linears: nn.Linear) -> list[Tensor | None]:
    return [weight for linear in linears for weight in (linear.weight, linear.bias)]


class _FeedForward(torch.autograd.Function):
    """`down(act(first(x)))`, or `down(act(first(x)) · second(x))`; a weight and a bias of each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        act: training.Activation,
        multiply: Multiply,
        *weights: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        (down, down_bias), *branches = _pairs(weights)
        hidden = [multiply(rows, weight.t(), bias) for weight, bias in branches]
        ctx.save_for_backward(rows, *weights, *hidden)
        ctx.act, ctx.multiply = act, multiply
        y = multiply(training.activation(*_two(hidden), act), down.t(), down_bias)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        multiply = ctx.multiply
        rows, *saved = ctx.saved_tensors
        count = len(saved) // 3  # a weight and a bias of each branch and what it gave, and down's
        (down, down_bias), *branches = _pairs(saved[:-count])
        hidden = saved[-count:]
        dy = above[0].reshape(rows.shape).contiguous()
        y, *slopes = training.activation_backward(multiply(dy, down, None), *_two(hidden), ctx.act)
        gradients = [multiply(dy.t(), y, None), None if down_bias is None else dy.sum(0)]
        dx: list[Tensor] = []
        for (weight, bias), slope in zip(branches, slopes, strict=True):
            gradients += [multiply(slope.t(), rows, None), None if bias is None else slope.sum(0)]
            dx.append(multiply(slope, weight, None))
        total = dx[0] if len(dx) == 1 else dx[0].add_(dx[1])
        return total.view(above[0].shape), None, None, *gradients


def _pairs(weights: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """Each weight with its bias."""
    pairs = zip(weights[::2], weights[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


def _two(hidden: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return hidden[0], hidden[1] if len(hidden) > 1 else None
