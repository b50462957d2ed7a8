"""Pre-norm blocks for training on a CPU: one native call before attention, and one after it.

In each call a thread computes norm, matmuls and activation for its own rows. The rows stay in the
CPU core's cache, and the thread does not wait for other threads. With one call per operation, a
small model spends as much time waiting as computing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.native_training.attention import TrainingAttention
from workhorse.execute.native_training.feedforward import (
    Gemm,
    NativeGatedMlp,
    NativeMlp,
    Simple,
    gradients_of_weights,
    is_plain_in,
    weights_of,
)
from workhorse.execute.native_training.norms import (
    NativeNorm,
    NativePreNorm,
    norm_of,
    rounded_sums,
    takes,
)
from workhorse.native import Training
from workhorse.native.blocks import Activation, Norm, NormOptions
from workhorse.nn.attention.grouped import Attention
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context, context_alone
from workhorse.nn.elementwise import Sum, Unchanged
from workhorse.nn.surgery import as_subclass, has_hooks, replace_modules


class NativeBlock(NativePreNorm):
    """`PreNorm` that runs as two native calls if the operators support its submodules and x."""

    multiply: Gemm

    def forward(
        self, x: Tensor, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Tensor:
        simple = self._simple(x)
        if simple is None:
            return super().forward(x, context, cache)
        attention = self.attention
        assert isinstance(attention, Attention)
        context = context or context_alone(x, attention.d_model, cache)
        how = self.operators, self.multiply
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        norm, feed_norm = norm_of(self.attention_norm), norm_of(self.feed_forward_norm)
        x, q, k, v = _NormProject.apply(x, *norm, *how, *weights_of(linears))
        y = context.by_part(attention.mix, q, k, v, cache=cache)
        linears = attention.out_proj, *simple.linears
        return _Feed.apply(x, y, *feed_norm, simple.act, *how, *weights_of(linears))

    def _simple(self, x: Tensor) -> Simple | None:
        """Return the block's feed-forward if the operators can compute the block, else None."""
        attention, feed_forward = self.attention, self.feed_forward
        if x.dtype not in self.multiply.sums or not takes(x) or not x.numel():
            return None
        computes = type(attention).forward, getattr(type(attention), "project", None)
        if computes != (Attention.forward, TrainingAttention.project):
            return None
        if type(feed_forward).forward not in (NativeMlp.forward, NativeGatedMlp.forward):
            return None
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, NativeMlp | NativeGatedMlp)
        norms = self.attention_norm, self.feed_forward_norm
        linears = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
        identities = self.attention_branch, self.feed_forward_branch, attention.inner_norm
        sums = self.attention_sum, self.feed_forward_sum
        unchanged = self.attention_convolution, self.feed_forward_convolution, attention.gate
        if (
            not all(isinstance(norm, NativeNorm) for norm in norms)
            or not all(is_plain_in(one, x.dtype) for one in linears)
            or not all(type(part) is nn.Identity for part in identities)
            or not all(type(part) is Unchanged for part in unchanged)
            or not all(type(one) is Sum for one in sums)
            or has_hooks(attention, feed_forward, *norms, *linears, *identities, *sums, *unchanged)
        ):
            return None
        return feed_forward.simple(x)


def replace_blocks(root: nn.Module, multiply: Gemm) -> nn.Module:
    """Make the pre-norm blocks in a module use two native calls, before and after attention.

    Call this after all other replacements.

    Returns:
        The module, or its replacement if it is a block itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is NativePreNorm:
            return as_subclass(module, NativeBlock, multiply=multiply)
        return module

    return replace_modules(root, choose)


class _NormProject(torch.autograd.Function):
    """`x` and `norm(x) Wᵀ + b` for each pair of W and b in `weights`.

    x is returned too, so that the gradient of the residual connection is added in the same call.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: NormOptions,
        operators: Training,
        multiply: Gemm,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        rows = _rows(x)
        matrices = [matrix for matrix in weights[::2] if matrix is not None]
        norm = Norm(weight, bias, options)
        y, moments, made = operators.norm_project(rows, norm, matrices, list(weights[1::2]))
        ctx.save_for_backward(rows, y, moments, weight, bias, *matrices)
        ctx.options, ctx.operators, ctx.multiply = options, operators, multiply
        return x, *(one.view(*x.shape[:-1], one.shape[1]) for one in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        rows, y, moments, weight, bias, *matrices = ctx.saved_tensors
        along, *aboves = map(_rows, above)
        dx, sums = ctx.operators.norm_project_backward(
            aboves, matrices, rows, moments, Norm(weight, bias, ctx.options), along
        )
        layers = [(one, y) for one in aboves]
        _, gradients = gradients_of_weights(ctx.multiply, layers, ctx.needs_input_grad[6:])
        of_norm = rounded_sums(sums, weight, bias)
        return dx.view(above[0].shape), *of_norm, None, None, None, *gradients


class _Feed(torch.autograd.Function):
    """The part of a block after attention: output projection, norm and feed-forward.

    `weights` are those of `BlockOperators.feed`.
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
        *weights: Tensor | None,
    ) -> Tensor:
        gathered, norm = _rows(attended), Norm(weight, bias, options)
        made = operators.feed(_rows(x), gathered, norm, act, list(weights))
        total, y, moments, out, *hidden = made
        ctx.save_for_backward(gathered, total, y, moments, weight, bias, *weights[::2], *hidden)
        ctx.options, ctx.act, ctx.operators, ctx.multiply = options, act, operators, multiply
        ctx.layers = len(weights) // 2
        return out.view(x.shape).detach()  # not a view: FSDP warns about views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        attended, total, y, moments, weight, bias, *rest = ctx.saved_tensors
        matrices, hidden = rest[: ctx.layers], rest[ctx.layers :]
        dout, norm = _rows(above[0]), Norm(weight, bias, ctx.options)
        dtotal, dattended, sums, active, *slopes = ctx.operators.feed_backward(
            dout, total, moments, hidden, norm, ctx.act, matrices
        )
        layers = [(dtotal, attended), (dout, active), *((slope, y) for slope in slopes)]
        _, gradients = gradients_of_weights(ctx.multiply, layers, ctx.needs_input_grad[8:])
        shape = above[0].shape
        return (
            dtotal.view(shape),
            dattended.view(*shape[:-1], dattended.shape[1]),
            *rounded_sums(sums, weight, bias),
            *(None,) * 4,
            *gradients,
        )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
