"""Norms for training on a CPU with native operators: one pass over the rows in each direction."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workhorse.execute.body import NativeModule
from workhorse.native import Training
from workhorse.native.blocks import Norm, NormOptions
from workhorse.nn import norms as plain
from workhorse.nn.products import autocast_dtype

TYPES = (torch.bfloat16, torch.float32)


class NativeNorm(NativeModule, plain.Norm):
    """A mixin for norms. It uses native operators for the inputs that they accept."""

    operators: Training

    def forward(self, x: Tensor) -> Tensor:
        if not takes(x):
            return super().forward(x)
        return AddNorm.apply(x, None, *norm_of(self), self.operators, False)[0]


def takes(x: Tensor) -> bool:
    """True if the native operators can compute norms of x."""
    return x.dtype in TYPES and autocast_dtype(x) is None


def norm_of(norm: plain.Norm) -> Norm:
    """Convert a norm module to the operators' format, so that they round as the module does.

    A LayerNorm of any precision sums in float32 and rounds its result, as PyTorch's kernels do.
    """
    facts = norm.facts
    weight, offset = norm.weight, norm.offset
    if weight is not None and offset and facts.rounds_gain:
        weight, offset = weight + offset, 0.0
    options = NormOptions(offset, norm.eps, facts.centred, facts.rounds_normal)
    return Norm(weight, norm.bias, options)


class AddNorm(torch.autograd.Function):
    """`total = x + branch` and `norm(total)`; without a branch, total is x.

    The backward pass adds the gradients of both results in one native call. With `keeps_total`
    False, only `norm(total)` is returned.
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
        keeps_total: bool,
    ) -> tuple[Tensor, ...]:
        total, told = x.contiguous(), options._asdict()
        if branch is None:
            y, moments = operators.norm(total, weight, bias, **told)
        else:
            total, y, moments = operators.add_norm(total, branch.contiguous(), weight, bias, **told)
        ctx.save_for_backward(total, moments, weight, bias)
        ctx.options, ctx.operators = options, operators
        ctx.joins = branch is not None
        return (total, y) if keeps_total else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        *along, into_norm = above
        x, moments, weight, bias = ctx.saved_tensors
        dx, sums = ctx.operators.norm_backward(
            into_norm.contiguous(),
            x,
            moments,
            weight,
            along[0].contiguous() if along else None,
            offset=ctx.options.offset,
            centred=ctx.options.centred,
        )
        return dx, dx if ctx.joins else None, *rounded_sums(sums, weight, bias), None, None, None


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
