"""Norms for training on a CPU with native operators: one pass over the rows in each direction."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.native import Training
from workhorse.native.blocks import Norm, NormOptions
from workhorse.nn import norms as plain
from workhorse.nn.blocks import PreNorm
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context
from workhorse.nn.elementwise import Sum
from workhorse.nn.products import autocast_dtype
from workhorse.nn.surgery import as_subclass, has_hooks, mixin_class, replace_modules

TYPES = (torch.bfloat16, torch.float32)


class NativeNorm(plain.Norm):
    """A mixin for norms. It uses native operators for the inputs that they accept."""

    operators: Training

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, *norm_of(self), self.operators) if takes(x) else super().forward(x)


class NativePreNorm(PreNorm):
    """`PreNorm` that computes a residual sum and the next norm in one native call.

    It runs as `PreNorm` if an operation is between sum and norm, or the operators do not accept x.
    """

    operators: Training

    def forward(
        self, x: Tensor, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Tensor:
        norms = self.attention_norm, self.feed_forward_norm
        branches = self.attention_branch, self.feed_forward_branch
        sums = self.attention_sum, self.feed_forward_sum
        if (
            not takes(x)
            or not all(isinstance(norm, NativeNorm) for norm in norms)
            or not all(type(branch) is nn.Identity for branch in branches)
            or not all(type(one) is Sum for one in sums)
            or has_hooks(*norms, *branches, *sums)
        ):
            return super().forward(x, context, cache)
        x, y = _AddNorm.apply(x, None, *norm_of(norms[0]), self.operators)
        x, y = _AddNorm.apply(x, self.attend(y, context, cache), *norm_of(norms[1]), self.operators)
        return x + self.feed(y, context, cache)


def replace_norms(root: nn.Module, operators: Training) -> nn.Module:
    """Make the norms in a module, and the residual sums before them, use native operators.

    Returns:
        The module, or its replacement if it is a norm itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is PreNorm:
            return as_subclass(module, NativePreNorm, operators=operators)
        facts = plain.norm_facts(module)
        if facts is not None and not (facts.centred and facts.rounds_normal):  # has no operator
            kind = mixin_class("Native", NativeNorm, type(module))
            return as_subclass(module, kind, operators=operators)
        return module

    return replace_modules(root, choose)


def takes(x: Tensor) -> bool:
    """True if the native operators can compute norms of x."""
    return x.dtype in TYPES and autocast_dtype(x) is None


def norm_of(norm: nn.Module) -> Norm:
    """Convert a norm module to the operators' format, so that they round as the module does.

    A LayerNorm of any precision sums in float32 and rounds its result, as PyTorch's kernels do.
    """
    assert isinstance(norm, plain.Norm)
    facts = norm.facts
    weight, offset = norm.weight, norm.offset
    if weight is not None and offset and facts.rounds_gain:
        weight, offset = weight + offset, 0.0
    options = NormOptions(offset, norm.eps, facts.centred, facts.rounds_normal)
    return Norm(weight, norm.bias, options)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: NormOptions,
        operators: Training,
    ) -> Tensor:
        x = x.contiguous()
        y, moments = operators.norm(x, weight, bias, **options._asdict())
        ctx.save_for_backward(x, moments, weight, bias)
        ctx.offset, ctx.centred, ctx.operators = options.offset, options.centred, operators
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return _norm_gradients(ctx, above[0], None)


class _AddNorm(torch.autograd.Function):
    """`total = x + branch` and `norm(total)`; without a branch, total is x.

    The backward pass adds the gradients of both results in one native call.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: NormOptions,
        operators: Training,
    ) -> tuple[Tensor, Tensor]:
        total, told = x.contiguous(), options._asdict()
        if branch is None:
            y, moments = operators.norm(total, weight, bias, **told)
        else:
            total, y, moments = operators.add_norm(total, branch.contiguous(), weight, bias, **told)
        ctx.save_for_backward(total, moments, weight, bias)
        ctx.offset, ctx.centred, ctx.operators = options.offset, options.centred, operators
        ctx.joins = branch is not None
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        along, into_norm = above
        dx, *others = _norm_gradients(ctx, into_norm, along.contiguous())
        return dx, dx if ctx.joins else None, *others


def _norm_gradients(ctx: Any, above: Tensor, other: Tensor | None) -> tuple[Tensor | None, ...]:
    x, moments, weight, bias = ctx.saved_tensors
    dx, sums = ctx.operators.norm_backward(
        above.contiguous(), x, moments, weight, other, offset=ctx.offset, centred=ctx.centred
    )
    return dx, *rounded_sums(sums, weight, bias), None, None


def rounded_sums(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Cast the gradients of a norm's weight and bias to the dtypes of weight and bias.

    `sums`, (2, width), has both gradients in float32.
    """
    return (
        None if weight is None else sums[0].to(weight.dtype),
        None if bias is None else sums[1].to(bias.dtype),
    )
