"""Attention for training on a CPU: gemms on blocks that stay in the CPU's cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workhorse.execute.body import NativeModule
from workhorse.execute.native_decoding.layers import attend_to_all
from workhorse.native import Decoding, Training
from workhorse.nn.attention.kernels import Sdpa
from workhorse.nn.attention.masks import AttentionPattern, Placement, slopes_of_distance


class TrainingSdpa(NativeModule, Sdpa):
    """`Sdpa` that uses the native operator for the inputs that the operator accepts.

    Attributes:
        operators: the operators of training.
        decoding: the operators of decoding, to compute the same bits as a decoding step; or None.
    """

    operators: Training
    decoding: Decoding | None = None

    @staticmethod
    def render(pattern: AttentionPattern, place: Placement, dtype: torch.dtype) -> Any:
        """Return `Sdpa`'s mask, or ALiBi's slopes instead if only causality hides keys."""
        slopes = slopes_of_distance(pattern)
        if slopes is None or pattern.reach or not place.aligned:
            return Sdpa.render(pattern, place, dtype)
        return slopes, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor | None, bool]) -> Tensor:
        hidden, causal = mask
        slopes = hidden if causal else None  # see `render`: a causal pass has no mask
        if self.decoding is not None and causal and (odd := q.shape[2] % 2):
            longer = (F.pad(x, (0, 0, 0, odd)) for x in (q, k, v))  # no query sees the last key
            return self(*longer, mask)[:, :, :-odd]
        can = (
            (hidden is None or causal)
            and not self.scoring.dropout
            and q.dtype == k.dtype == v.dtype
            and q.dtype in self.operators.attention_types
            and k.shape == v.shape
            and q.shape[2:] == k.shape[2:]
            and (q.dtype == torch.float32 or q.shape[2] % 2 == q.shape[3] % 2 == 0)
            and all(map(_has_whole_rows, (q, k, v)))
        )
        if not can:
            if slopes is not None:
                biased = AttentionPattern(alibi_slopes=tuple(slopes.tolist()))
                at = torch.arange(q.shape[2])[None]
                mask = Sdpa.render(biased, Placement(at, at), q.dtype)
            return super().forward(q, k, v, mask)
        how = self.scoring.scale, causal, slopes, self.operators, self.decoding
        return _Attention.apply(q, k, v, *how)


class _Attention(torch.autograd.Function):
    """Native attention with gradients. Keys and values that query heads share are saved once."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        causal: bool,
        slopes: Tensor | None,
        operators: Training,
        decoding: Decoding | None,
    ) -> Tensor:
        every_k, every_v = _of_each_head(k, q.shape[1]), _of_each_head(v, q.shape[1])
        how: dict[str, Any] = {"scale": scale, "causal": causal, "slopes": slopes}
        y, normaliser = operators.attention(q, every_k, every_v, **how)
        if decoding is not None:
            y = attend_to_all(decoding, q, k, v, **how)
        ctx.save_for_backward(q, k, v, y, normaliser)
        ctx.how, ctx.operators = how, operators
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, normaliser = ctx.saved_tensors
        (gradient,) = above
        if not _has_whole_rows(gradient):  # such as the gradient of a sum, an expanded scalar
            gradient = gradient.contiguous()
        dq, dk, dv = ctx.operators.attention_backward(
            q,
            _of_each_head(k, q.shape[1]),
            _of_each_head(v, q.shape[1]),
            y,
            gradient,
            normaliser,
            **ctx.how,
        )
        return dq, _of_shared_heads(dk, k), _of_shared_heads(dv, v), *(None,) * 5


def _has_whole_rows(x: Tensor) -> bool:
    """True if the operator can read the rows of x, (…, width), as words of four bytes."""
    return x.stride(-1) == 1 and x.stride(-2) * x.itemsize % 4 == 0


def _of_each_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values so that each of `heads` query heads has its own copy."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _of_shared_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given the gradient of `_of_each_head(x)`."""
    shared = x.shape[1]
    return gradient if gradient.shape[1] == shared else gradient.unflatten(1, (shared, -1)).sum(2)
