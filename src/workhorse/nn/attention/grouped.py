"""Self-attention: multi-head, grouped-query (2305.13245) and multi-query (1911.02150).

`y = out_proj(norm(gate(softmax(q kᵀ · scale + mask) v)))`. Each option adds a module or omits
it; the forward pass is the same for all options.
"""

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from workhorse.config.base import Config, ConfigError
from workhorse.nn.attention.kernels import Kernel, KernelName, Scoring, make_kernel
from workhorse.nn.attention.masks import AttentionPattern
from workhorse.nn.attention.self_attention import (
    QKNormConfig,
    SelfAttention,
    SelfAttentionConfig,
    make_head_norm,
    make_rotation,
    norm_then_rotate,
    rotate_then_norm,
    split_heads,
)
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context, context_alone
from workhorse.nn.elementwise import Clip, Unchanged
from workhorse.nn.facts import Divisions
from workhorse.nn.norms import PresentNormConfig
from workhorse.nn.positions.absolute import OF_THE_EMBEDDING, AlibiConfig, NoPositionConfig
from workhorse.nn.positions.rope import RopeConfig
from workhorse.nn.shapes import HeadOutputs, Hidden, Queries, SideBySide

AttentionPositionConfig = Annotated[
    NoPositionConfig | RopeConfig | AlibiConfig, Field(discriminator="kind")
]


class QueryScalingConfig(Config):
    """Multiply queries by `1 + scale · ln(1 + floor((position + offset) / length))` (Llama 4).

    The growth with position keeps attention sharp in long sequences.
    """

    scale: float
    """The factor on the logarithm."""
    length: int = Field(gt=0)
    """Tokens per step of the factor: `length` consecutive positions have the same factor."""
    offset: int = Field(default=0, ge=0)
    """Added to every position, in tokens."""


class AttentionConfig(SelfAttentionConfig):
    """Multi-head, grouped-query or multi-query self-attention."""

    elsewhere = OF_THE_EMBEDDING
    kind: Literal["attention"] = "attention"
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Number of key and value heads. None: `n_heads`; 1 is multi-query attention."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of a query and a key. None: `d_model // n_heads`."""
    value_dim: int | None = Field(default=None, gt=0)
    """Width of a value. None: the width of a key."""
    position: AttentionPositionConfig = NoPositionConfig()
    """Position information in attention: `rope`, `alibi` or `none`."""
    scale: float | None = Field(default=None, gt=0)
    """Factor on the scores. None: `1/sqrt(head_dim)`, which keeps their variance near 1."""
    scale_by_layer: bool = False
    """Divide the scale by the layer's number, counted from 1 (an option of GPT-2)."""
    query_scaling: QueryScalingConfig | None = None
    """Scaling of queries by their position, or None."""
    qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    out_bias: bool = False
    """A bias on the output projection."""
    qk_norm: QKNormConfig | None = None
    """Norms on queries and keys, or None."""
    clip: float | None = Field(default=None, gt=0)
    """Clamp queries, keys and values to plus or minus this value (MPT, OLMo)."""
    softcap: float | None = Field(default=None, gt=0)
    """Soft-cap the scores at plus and minus this: `softcap · tanh(score / softcap)` (Gemma 2)."""
    sinks: bool = False
    """Attention sinks: one learned logit per head, with a weight but no value (gpt-oss)."""
    output_gate: bool = False
    """Multiply the heads' outputs by a sigmoid gate of the input (AFMoE; 2505.06708)."""
    inner_norm: PresentNormConfig | None = None
    """A norm over the outputs of all heads together, before the output projection (Magneto,
    2210.06423 §2; BitNet), or None."""

    def model_post_init(self, _context: object) -> None:
        super().model_post_init(_context)
        if self.n_kv_heads and self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads={self.n_heads} is not divisible by n_kv_heads={self.n_kv_heads}; "
                "choose a divisor of n_heads"
            )
        if self.qk_norm and self.qk_norm.after_rope and not isinstance(self.position, RopeConfig):
            raise ConfigError("qk_norm.after_rope=true needs a rope position; remove it")
        if not self.causal and isinstance(self.position, AlibiConfig) and self.position.bfloat16:
            raise ConfigError(
                "position.bfloat16=true needs causal=true: its bias depends only on the key"
            )

    def key_dim(self, d_model: int) -> int:
        """Width of a head's queries and keys.

        Raises:
            ConfigError: the width is not a whole number, or the rotation does not fit it.
        """
        if d_model < 1:
            raise ConfigError(f"d_model={d_model} is not positive; choose 1 or more")
        if self.head_dim is None and d_model % self.n_heads:
            raise ConfigError(
                f"d_model={d_model} is not divisible by n_heads={self.n_heads}; "
                "choose a divisor, or give head_dim"
            )
        head_dim = self.head_dim or d_model // self.n_heads
        if isinstance(self.position, RopeConfig):
            self.position.rotary_dim(head_dim)
        return head_dim

    def pattern(self, d_model: int, layer: int) -> AttentionPattern:
        if not isinstance(self.position, AlibiConfig):
            return self.reach()
        return replace(
            self.reach(),
            alibi_slopes=self.position.slopes(self.n_heads),
            alibi_scale=self.score_scale(d_model, layer) if self.position.scaled else 1.0,
            alibi_bfloat16=self.position.bfloat16,
        )

    def score_scale(self, d_model: int, layer: int) -> float:
        scale = self.scale or 1 / math.sqrt(self.key_dim(d_model))
        return scale / (layer + 1) if self.scale_by_layer else scale

    def scoring(self, d_model: int, layer: int) -> Scoring:
        return Scoring(
            scale=self.score_scale(d_model, layer),
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout,
        )

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> "Attention":
        pattern = self.pattern(d_model, layer)
        scoring = self.scoring(d_model, layer)
        head_dim = self.key_dim(d_model)
        return Attention(
            d_model,
            self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=head_dim,
            value_dim=self.value_dim,
            pattern=pattern,
            kernel=make_kernel(kernel, pattern, scoring, self.n_heads),
            rope=self.position if isinstance(self.position, RopeConfig) else None,
            qk_norm=self.qk_norm,
            query_scaling=self.query_scaling,
            clip=self.clip,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            output_gate=self.output_gate,
            inner_norm=self.inner_norm,
        )


class Attention(SelfAttention):
    """Causal self-attention over `(batch, seq, d_model)`.

    `AttentionConfig.build` creates it, with more options. It can also be created directly.

    Args:
        d_model: width of the input and output.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads; `n_heads / n_kv_heads` query heads share each.
        head_dim: width of a query and a key; default: `d_model // n_heads`.
        value_dim: width of a value; default: `head_dim`.
        pattern: attention pattern; default: causal.
        kernel: name of a kernel, or a built kernel with its scale and options.
        rope: rotation of queries and keys, or None.
        qk_norm: norms on queries and keys, or None.
        query_scaling: scaling of queries by position, or None.
        clip: bound that q, k and v are clamped to, or None.
        qkv_bias: True to add biases to the projections to q, k and v.
        out_bias: True to add a bias to the output projection.
        output_gate: True to add a sigmoid gate on the heads' outputs.
        inner_norm: norm over the outputs of all heads, after the gate, or None.

    Raises:
        ConfigError: `AttentionConfig` rejects these heads and widths.
    """

    division: ClassVar[Divisions] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "inner_norm": "features",
        "out_proj": "row",
    }

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        pattern: AttentionPattern | None = None,
        kernel: Kernel | KernelName = "auto",
        rope: RopeConfig | None = None,
        qk_norm: QKNormConfig | None = None,
        query_scaling: QueryScalingConfig | None = None,
        clip: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        output_gate: bool = False,
        inner_norm: PresentNormConfig | None = None,
    ) -> None:
        super().__init__()
        sizes = AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            position=rope or NoPositionConfig(),
            qk_norm=qk_norm,
        )
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads or n_heads
        self.head_dim = sizes.key_dim(d_model)
        self.value_dim = value_dim or self.head_dim
        self.pattern = pattern or AttentionPattern()
        if isinstance(kernel, str):
            scoring = Scoring(scale=1 / math.sqrt(self.head_dim))
            kernel = make_kernel(kernel, self.pattern, scoring, n_heads)
        self.kernel = kernel

        width_out = n_heads * self.value_dim
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(d_model, self.n_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(d_model, self.n_kv_heads * self.value_dim, bias=qkv_bias)
        self.q_clip, self.k_clip, self.v_clip = (
            Clip(clip) if clip else nn.Identity() for _ in range(3)
        )
        self.q_norm = make_head_norm(qk_norm, n_heads, self.head_dim)
        self.k_norm = make_head_norm(qk_norm, self.n_kv_heads, self.head_dim)
        self.q_rotation, self.k_rotation = (
            make_rotation(rope, self.head_dim) if rope else Unchanged() for _ in range(2)
        )
        after_rope = qk_norm is not None and qk_norm.after_rope
        self.norm_and_rotate = rotate_then_norm if after_rope else norm_then_rotate
        self.scale_queries = QueryScaling(query_scaling) if query_scaling else Unchanged()
        self.gate = OutputGate(d_model, width_out) if output_gate else Unchanged()
        self.inner_norm = inner_norm.build(width_out) if inner_norm else nn.Identity()
        self.out_proj = nn.Linear(width_out, d_model, bias=out_bias)

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        context = context or context_alone(x, self.d_model, cache)
        y = context.by_part(self.mix, *self.project(x), cache=cache)
        return self.out_proj(self.inner_norm(self.gate(y, x)))

    def project(self, x: Hidden) -> tuple[SideBySide, SideBySide, SideBySide]:
        """The concatenated queries, keys and values of all heads, (batch, seq, heads · width)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def mix(
        self,
        q: SideBySide,
        k: SideBySide,
        v: SideBySide,
        context: Context,
        cache: CacheEntry | None,
    ) -> HeadOutputs:
        """The concatenated outputs of all heads, from the tensors that `project` returns."""
        q = split_heads(self.q_clip(q), self.n_heads)  # (batch, heads, seq, head_dim)
        k = split_heads(self.k_clip(k), self.n_kv_heads)  # (batch, kv_heads, …)
        v = split_heads(self.v_clip(v), self.n_kv_heads)
        q = self.norm_and_rotate(q, self.q_norm, self.q_rotation, context)
        k = self.norm_and_rotate(k, self.k_norm, self.k_rotation, context)
        q = self.scale_queries(q, context)
        if cache is not None:
            k, v = cache.update(k, v)
        mask = context.mask(self.pattern, self.kernel, q.dtype)
        y = self.kernel(q, k, v, mask)  # (batch, heads, seq, value_dim)
        return y.transpose(1, 2).flatten(2)  # (batch, seq, heads · value_dim)

    def extra_repr(self) -> str:
        return self.norm_and_rotate.__name__


class QueryScaling(nn.Module):
    """`q · (1 + scale · ln(1 + floor((p + offset) / length)))`."""

    def __init__(self, config: QueryScalingConfig) -> None:
        super().__init__()
        self.growth = config

    def forward(self, q: Queries, context: Context) -> Queries:
        stretches = (context.positions + self.growth.offset) // self.growth.length
        factor = 1 + self.growth.scale * torch.log1p(stretches.clamp(min=0).float())
        return q * factor[:, None, :, None].to(q.dtype)


class OutputGate(nn.Module):
    """`y · sigmoid(proj(x))`."""

    division: ClassVar[Divisions] = {"proj": "column"}

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, width, bias=False)

    def forward(self, y: HeadOutputs, x: Hidden) -> HeadOutputs:
        return y * torch.sigmoid(self.proj(x))
