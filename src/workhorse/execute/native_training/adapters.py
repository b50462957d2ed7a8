"""Low-rank adapters for training on a CPU: base and update as sums of gemms in one native call."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.execute.native_training.feedforward import Gemm, NativeLinear
from workhorse.native.matrix_unit import rows
from workhorse.native.vectors import Sum
from workhorse.nn.surgery import has_hooks
from workhorse.transforms.lora import Adapted, LowRank


class NativeLoraLinear(Adapted, NativeLinear):
    """`LoraLinear` that uses `multiply`, for LoRA without dropout as one autograd function."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        adapter = None if self.active is None else self.adapters[self.active]
        if type(adapter) is not LowRank or not self._is_simple(x, adapter):
            return super().forward(x)
        a, b = adapter.lora_a.weight, adapter.lora_b.weight
        return _Lora.apply(x, self.weight, self.bias, a, b, adapter.scale, self.multiply)

    def _is_simple(self, x: Tensor, adapter: LowRank) -> bool:
        """True if the gemms can compute the layer: no dropout, hooks or trained base."""
        a, b = adapter.lora_a, adapter.lora_b
        return (
            type(adapter.dropout) is nn.Identity
            and type(a) is type(b) is NativeLinear
            and not any(one.requires_grad for one in (self.weight, self.bias) if one is not None)
            and all(self.multiply.takes(x, one) for one in (self.weight, a.weight, b.weight))
            and not has_hooks(adapter, a, b, adapter.dropout)
        )


class _Lora(torch.autograd.Function):
    """`x Wᵀ + bias + scale · (x Aᵀ) Bᵀ` with gradients of x, A and B."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        multiply: Gemm,
    ) -> Tensor:
        matrix = rows(x)
        narrow = multiply(matrix, a.t()).mul_(scale)
        y, *_ = _together(multiply, Sum([(matrix, weight.t()), (narrow, b.t())], bias))
        ctx.save_for_backward(x, narrow, weight, a, b)
        ctx.scale, ctx.multiply = scale, multiply
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weight, a, b = ctx.saved_tensors
        multiply: Gemm = ctx.multiply
        dy = rows(above[0])
        slope = multiply(dy, b).mul_(ctx.scale)
        of_a, of_b = Sum([(slope.t(), rows(x))]), Sum([(dy.t(), narrow)])
        if not ctx.needs_input_grad[0]:
            da, db = multiply.together(of_a, of_b)
            return None, None, None, da, db, None, None
        dx, da, db = _together(multiply, Sum([(dy, weight), (slope, a)]), of_a, of_b)
        return dx.view(x.shape), None, None, da, db, None, None


def _together(multiply: Gemm, first: Sum, *others: Sum) -> list[Tensor]:
    """`Gemm.together`, where `first` is a sum of a large and a narrow product.

    If no operator computes sums, PyTorch adds the narrow product in place, in one pass.
    """
    (large, narrow), bias = first.pairs, first.bias
    if large[0].dtype in multiply.sums:
        return multiply.together(first, *others)
    total, *rest = multiply.together(Sum([large], bias), *others)
    return [total.addmm_(*narrow), *rest]
