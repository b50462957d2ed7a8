"""Parts of blocks for training on a CPU that are one native call before or after attention.

In each call a thread computes norm, matmuls and activation for its own rows. The rows stay in the
CPU core's cache, and the thread does not wait for other threads. With one call per operation, a
small model spends as much time waiting as computing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workhorse.execute.native_training.feedforward import (
    Gemm,
    contiguous_rows,
    gradients_of_weights,
)
from workhorse.execute.native_training.norms import rounded_sums
from workhorse.native import Training
from workhorse.native.blocks import Activation, Norm, NormOptions


class NormProject(torch.autograd.Function):
    """`total = x + branch`, `y = norm(total)`, and `y Wᵀ + b` for each pair in `weights`.

    Without a branch, total is x. Returns total if `keeps_total`, y if `keeps_y`, and the matmul
    results. The backward pass adds the gradients of all results in the same call.
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
        multiply: Gemm,
        keeps_total: bool,
        keeps_y: bool,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        matrices = [matrix for matrix in weights[::2] if matrix is not None]
        total, y, moments, made = operators.norm_project(
            contiguous_rows(x),
            None if branch is None else contiguous_rows(branch),
            Norm(weight, bias, options),
            matrices,
            list(weights[1::2]),
        )
        ctx.save_for_backward(total, y, moments, weight, bias, *matrices)
        ctx.options, ctx.operators, ctx.multiply = options, operators, multiply
        ctx.joins, ctx.keeps_total, ctx.keeps_y = branch is not None, keeps_total, keeps_y
        kept = [x if branch is None else total.view(x.shape)] if keeps_total else []
        kept += [y.view(x.shape)] if keeps_y else []
        return *kept, *(one.view(*x.shape[:-1], one.shape[1]) for one in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        rows, y, moments, weight, bias, *matrices = ctx.saved_tensors
        aboves = list(map(contiguous_rows, above))
        along = aboves.pop(0) if ctx.keeps_total else None
        of_y = aboves.pop(0) if ctx.keeps_y else None
        norm = Norm(weight, bias, ctx.options)
        dx, sums = ctx.operators.norm_project_backward(
            aboves, matrices, rows, moments, norm, of_y, along
        )
        layers = [(one, y) for one in aboves]
        _, gradients = gradients_of_weights(ctx.multiply, layers, ctx.needs_input_grad[9:])
        dx = dx.view(*above[0].shape[:-1], dx.shape[1])
        of_norm = rounded_sums(sums, weight, bias)
        return dx, dx if ctx.joins else None, *of_norm, *(None,) * 5, *gradients


class Feed(torch.autograd.Function):
    """The part of a block after attention: output projection, norm and feed-forward.

    `weights` and `normed` are those of `BlockOperators.feed`.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: NormOptions,
        act: Activation,
        operators: Training,
        multiply: Gemm,
        normed: bool,
        *weights: Tensor | None,
    ) -> Tensor:
        gathered, norm = contiguous_rows(attended), Norm(weight, bias, options)
        made = operators.feed(contiguous_rows(x), gathered, norm, act, list(weights), normed=normed)
        total, y, moments, out, *hidden = made
        ctx.save_for_backward(gathered, total, y, moments, weight, bias, *weights[::2], *hidden)
        ctx.options, ctx.act, ctx.operators, ctx.multiply = options, act, operators, multiply
        ctx.layers, ctx.normed = len(weights) // 2, normed
        return out.view(x.shape).detach()  # not a view: FSDP warns about views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        attended, total, y, moments, weight, bias, *rest = ctx.saved_tensors
        matrices, hidden = rest[: ctx.layers], rest[ctx.layers :]
        dout, norm = contiguous_rows(above[0]), Norm(weight, bias, ctx.options)
        dtotal, dattended, sums, active, *slopes = ctx.operators.feed_backward(
            dout, total, moments, hidden, norm, ctx.act, matrices, normed=ctx.normed
        )
        layers = [(dtotal, attended), (dout, active), *((slope, y) for slope in slopes)]
        _, gradients = gradients_of_weights(ctx.multiply, layers, ctx.needs_input_grad[9:])
        shape = above[0].shape
        return (
            dtotal.view(shape),
            dattended.view(*shape[:-1], dattended.shape[1]),
            *rounded_sums(sums, weight, bias),
            *(None,) * 5,
            *gradients,
        )
