"""Attention kernels: three implementations of `softmax(q kᵀ · scale + mask) v`.

The kernel is chosen when a model is built. It is not part of the config, so that a checkpoint can
be used on machines with different kernels. A kernel raises an error for options that it does not
support. In every kernel, the output for a query that sees no key is zero.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from workhorse.errors import WorkhorseError
from workhorse.nn.attention.masks import (
    AttentionPattern,
    Placement,
    alibi_bias,
    hides_something,
    sees,
    visible,
)
from workhorse.nn.facts import Divisions
from workhorse.nn.shapes import AttentionOutput, Keys, Mask, Queries, ScoreBias, Values

MIN_HEAD_DIM = 16
"""The smallest head_dim that compiled FlexAttention supports on a GPU."""
MIN_CPU_KEYS = 128
"""The smallest number of keys for which flex is compiled on a CPU. With fewer, the compiled code of
PyTorch 2.13 reads memory that it has not written."""

KernelName = Literal["auto", "eager", "sdpa", "flex", "flex-uncompiled"]


@dataclass(frozen=True)
class Scoring:
    """Options of attention, except the pattern of visible keys.

    Attributes:
        scale: factor on `q kᵀ`.
        softcap: limit of the scores, `softcap * tanh(score / softcap)`, applied before mask and
            bias (Gemma 2, 2408.00118), or None.
        sinks: True to add one learned logit per head to the softmax (gpt-oss). It gets a weight
            but has no value.
        dropout: dropout on the attention weights in training.
    """

    scale: float
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0


class Kernel(nn.Module, ABC):
    """Base class of attention kernels: they compute outputs from queries, keys and values.

    Args:
        scoring: options of attention.
        n_heads: number of query heads, and size of the parameter `sinks` if there are sinks.
    """

    division: ClassVar[Divisions] = {"sinks": "heads"}

    decodes = True
    """True if the kernel supports a KV cache, whose number of keys grows with every token."""
    reads_blocks = False
    """True if the kernel reads keys and values from the blocks of a paged cache (`InBlocks`); False
    if it needs one contiguous tensor."""

    def __init__(self, scoring: Scoring, n_heads: int) -> None:
        super().__init__()
        self.scoring = scoring
        self.sinks = nn.Parameter(torch.empty(n_heads)) if scoring.sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @staticmethod
    def refusal(pattern: AttentionPattern, scoring: Scoring) -> str | None:
        """Reason why this kernel does not support these options, or None if it supports them."""
        del pattern, scoring
        return None

    @staticmethod
    @abstractmethod
    def render(pattern: AttentionPattern, place: Placement, dtype: torch.dtype) -> Any:
        """Create the mask, in the form that this kernel's `forward` expects."""

    @abstractmethod
    def forward(self, q: Queries, k: Keys, v: Values, mask: Any) -> AttentionOutput:
        """Compute attention; `mask` is the result of `render`."""


class Eager(Kernel):
    """The reference kernel: computes the whole attention matrix.

    The submodule `weights` returns this matrix, so that a forward hook can read it; `scores`
    returns the matrix before the softmax, with a last column for the sinks if there are any.
    """

    def __init__(self, scoring: Scoring, n_heads: int) -> None:
        super().__init__(scoring, n_heads)
        self.scores = nn.Identity()
        self.weights = nn.Dropout(scoring.dropout)

    @staticmethod
    def render(
        pattern: AttentionPattern, place: Placement, dtype: torch.dtype
    ) -> tuple[Mask | None, ScoreBias | None]:
        del dtype
        bias = alibi_bias(pattern, place) if pattern.alibi_slopes else None
        everything = not pattern.causal or place.last
        if everything and not hides_something(pattern, place):
            return None, bias
        return visible(pattern, place), bias

    def forward(
        self, q: Queries, k: Keys, v: Values, mask: tuple[Mask | None, ScoreBias | None]
    ) -> AttentionOutput:
        allowed, bias = mask
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-2, -1)).float() * self.scoring.scale  # (batch, heads, seq, kv)
        scores = self.scores(self.shape_scores(scores, allowed, bias))
        weights = scores.softmax(dim=-1)[..., : k.shape[2]]
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0.0)  # zeros for a query that sees no key
        return self.weights(weights.to(v.dtype)) @ v

    def shape_scores(self, scores: Tensor, allowed: Mask | None, bias: ScoreBias | None) -> Tensor:
        """Apply the soft-cap, the bias, the mask and the sinks, in this order.

        Scores of hidden keys are set to the lowest finite value, not to -inf, because the softmax
        of a row of only -inf is NaN.
        """
        if self.scoring.softcap is not None:
            scores = self.scoring.softcap * torch.tanh(scores / self.scoring.softcap)
        if bias is not None:
            scores = scores + bias
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            column = self.sinks.to(scores.dtype)[None, :, None, None]
            scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
        return scores


class Sdpa(Kernel):
    """PyTorch's fused attention: FlashAttention (2205.14135) if the device supports it."""

    @staticmethod
    def refusal(pattern: AttentionPattern, scoring: Scoring) -> str | None:
        del pattern
        if scoring.softcap is not None:
            return "sdpa does not support softcap"
        return "sdpa does not support sinks" if scoring.sinks else None

    @staticmethod
    def render(
        pattern: AttentionPattern, place: Placement, dtype: torch.dtype
    ) -> tuple[Tensor | None, bool]:
        """The arguments `attn_mask` and `is_causal` of `F.scaled_dot_product_attention`.

        `is_causal` is True only if queries and keys are the same tokens, because PyTorch aligns its
        causal mask to the top left. The mask is bool, or float with ALiBi.
        """
        hidden = hides_something(pattern, place)
        if pattern.alibi_slopes:
            bias = alibi_bias(pattern, place)
            return bias.masked_fill(~visible(pattern, place), -math.inf).to(dtype), False
        if hidden:
            return visible(pattern, place), False
        return None, pattern.causal and not place.last

    def forward(
        self, q: Queries, k: Keys, v: Values, mask: tuple[Tensor | None, bool]
    ) -> AttentionOutput:
        attn_mask, is_causal = mask
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.scoring.dropout if self.training else 0.0,
            scale=self.scoring.scale,
            enable_gqa=bool(q.shape[1] != k.shape[1]),  # a compiler's sizes may be symbolic
        )


class Flex(Kernel):
    """FlexAttention (2412.05496): needs no full mask for windows, documents, ALiBi or soft-caps.

    It has no backward pass on a CPU. This class is the kernel `flex-uncompiled` for tests, which
    computes the whole attention matrix. The kernel `flex` is `CompiledFlex`.
    """

    @staticmethod
    def refusal(pattern: AttentionPattern, scoring: Scoring) -> str | None:
        del pattern
        return "flex does not support attention dropout" if scoring.dropout else None

    @staticmethod
    def render(
        pattern: AttentionPattern, place: Placement, dtype: torch.dtype
    ) -> tuple[BlockMask | None, Callable[..., Tensor] | None]:
        """FlexAttention's block mask and a function that adds ALiBi; None if not needed."""
        del dtype
        queries, keys, documents = place.queries, place.keys, place.documents
        of_keys = documents if place.key_documents is None else place.key_documents
        rows = queries.shape[0]  # 1 if all rows of the batch have the same positions

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del h
            seen = sees(pattern, queries[b % rows, q], keys[b % rows, k])
            if documents is None or of_keys is None:
                return seen
            return seen & (documents[b, q] == of_keys[b, k])

        slopes = torch.tensor(pattern.alibi_slopes, device=keys.device)

        def add_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            i, j = queries[b % rows, q], keys[b % rows, k]
            if pattern.alibi_bfloat16:
                bias = (slopes[h].bfloat16() * j.clamp(min=0).bfloat16()).float()
            else:
                bias = slopes[h] * -(i - j).abs()
            return score + bias * pattern.alibi_scale

        shape = (rows if rows > 1 else None, None, queries.shape[1], keys.shape[1])
        everything = (not pattern.causal or place.last) and not hides_something(pattern, place)
        block_mask = None if everything else create_block_mask(mask, *shape, device=keys.device)
        return block_mask, add_alibi if pattern.alibi_slopes else None

    def forward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        mask: tuple[BlockMask | None, Callable[..., Tensor] | None],
    ) -> AttentionOutput:
        if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
            raise WorkhorseError("kernel=flex has no backward on a CPU; train with sdpa or eager")
        block_mask, add_alibi = mask
        result = self.attend(q, v)(
            q,
            k,
            v,
            score_mod=self.score_function(add_alibi),
            block_mask=block_mask,
            scale=self.scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if self.sinks is None else AuxRequest(lse=True),
        )
        if self.sinks is None:
            return result
        # One more term e^sink in the softmax's denominator Z: y Z / (Z + e^sink).
        y, aux = result
        kept = torch.sigmoid(aux.lse - self.sinks[None, :, None])
        return y * kept.unsqueeze(-1).to(y.dtype)

    def attend(self, q: Queries, v: Values) -> Callable[..., Any]:
        """The FlexAttention function to call for these queries and values."""
        del q, v
        return flex_attention

    def score_function(
        self, add_alibi: Callable[..., Tensor] | None
    ) -> Callable[..., Tensor] | None:
        """The function that applies the soft-cap and then ALiBi to a score; None if neither."""
        cap = self.scoring.softcap
        if cap is None:
            return add_alibi

        def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            score = cap * torch.tanh(score / cap)
            return score if add_alibi is None else add_alibi(score, b, h, q, k)

        return capped


class CompiledFlex(Flex):
    """FlexAttention compiled into one fused kernel, separately for every sequence length."""

    decodes = False

    def attend(self, q: Queries, v: Values) -> Callable[..., Any]:
        """The compiled FlexAttention function.

        Raises:
            WorkhorseError: sinks are used on a CPU, or heads narrower than `MIN_HEAD_DIM` on a GPU.
        """
        if self.sinks is not None and q.is_cpu:
            raise WorkhorseError("kernel=flex cannot compute sinks on a CPU; use kernel=eager")
        head_dim = min(q.shape[-1], v.shape[-1])
        if q.is_cuda and head_dim < MIN_HEAD_DIM:
            raise WorkhorseError(
                f"kernel=flex on a GPU needs head_dim >= {MIN_HEAD_DIM}, not {head_dim}; "
                "use kernel=sdpa or eager"
            )
        if q.is_cpu and v.shape[-2] < MIN_CPU_KEYS:
            return flex_attention
        return _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    function = cast(Callable[..., Any], flex_attention)
    return torch.compile(function, dynamic=False)  # pyright: ignore[reportUnknownMemberType]


_KERNELS: dict[str, type[Kernel]] = {
    "eager": Eager,
    "sdpa": Sdpa,
    "flex": CompiledFlex,
    "flex-uncompiled": Flex,
}


def make_kernel(
    name: KernelName, pattern: AttentionPattern, scoring: Scoring, n_heads: int
) -> Kernel:
    """Create the kernel called `name`; `auto` is sdpa if it supports the options, else eager.

    Raises:
        WorkhorseError: the name is unknown, or the kernel does not support the options.
    """
    if name == "auto":
        name = "eager" if Sdpa.refusal(pattern, scoring) else "sdpa"
    if name not in _KERNELS:
        raise WorkhorseError(f"kernel={name!r} is unknown; choose auto, {', '.join(_KERNELS)}")
    refusal = _KERNELS[name].refusal(pattern, scoring)
    if refusal:
        raise WorkhorseError(f"kernel={name} cannot run this model: {refusal}; use kernel=eager")
    return _KERNELS[name](scoring, n_heads)
