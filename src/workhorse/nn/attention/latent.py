"""Multi-head latent attention: keys and values projected up from one small vector per position.

The cache holds that vector (the latent) and one rotary key shared by all heads. Paper: DeepSeek-V2,
2405.04434 §2.1.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.nn.attention.kernels import Kernel, KernelName, Scoring, make_kernel
from workhorse.nn.attention.self_attention import (
    SelfAttention,
    SelfAttentionConfig,
    make_rotation,
    split_heads,
)
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context, context_alone
from workhorse.nn.facts import Divisions
from workhorse.nn.norms import RMSNormConfig
from workhorse.nn.positions.rope import RopeConfig
from workhorse.nn.shapes import (
    AttentionOutput,
    HeadOutputs,
    Hidden,
    Latents,
    Queries,
    RotaryKeys,
    RotaryQueries,
    SideBySide,
)


class LatentAttentionConfig(SelfAttentionConfig):
    """Attention with keys and values that are projected from a latent of width `kv_rank`.

    In a head's query and key, `rope_dim` features are rotated by RoPE and `nope_dim` are not.
    """

    kind: Literal["latent_attention"] = "latent_attention"
    q_rank: int | None = Field(default=None, gt=0)
    """Width of the latent that queries are projected from. None: queries are projected directly
    from the input."""
    kv_rank: int = Field(gt=0)
    """Width of the latent that keys and values are projected from. The cache stores this latent."""
    nope_dim: int = Field(gt=0)
    """Number of features of a head's query and key that are not rotated by RoPE."""
    rope_dim: int = Field(gt=0)
    """Number of features of a head's query and key that are rotated by RoPE."""
    value_dim: int = Field(gt=0)
    """Width of a value."""
    position: RopeConfig = RopeConfig()
    """RoPE options for the `rope_dim` rotated features of queries and keys."""
    norm: RMSNormConfig = RMSNormConfig()
    """The norm on the latents."""
    scale: float | None = Field(default=None, gt=0)
    """Factor on the scores. None: `1/sqrt(nope_dim + rope_dim)`. With YaRN, DeepSeek's models
    multiply this default by `(0.1 mscale_all_dim ln(factor) + 1)²`."""
    qkv_bias: bool = False
    """Biases on the projections to the latents and to the rotary key. The projections from the
    latents have no biases."""
    out_bias: bool = False
    """A bias on the output projection."""

    @property
    def n_kv_heads(self) -> int:
        """Number of key and value heads after the projection: one per query head."""
        return self.n_heads

    def key_dim(self, d_model: int) -> int:
        """Width of a head's queries and keys.

        Raises:
            ConfigError: RoPE does not support this `rope_dim`.
        """
        del d_model
        self.position.rotary_dim(self.rope_dim)
        return self.nope_dim + self.rope_dim

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> SelfAttention:
        del layer
        scale = self.scale or 1 / math.sqrt(self.key_dim(d_model))
        scoring = Scoring(scale=scale, dropout=self.dropout)
        made = make_kernel(kernel, self.reach(), scoring, self.n_heads)
        if self.q_rank is None:
            return DirectQueries(d_model, self, made)
        return LatentQueries(d_model, self, made, self.q_rank)


@runtime_checkable
class HasMatrix(Protocol):
    """A linear layer that multiplies by another matrix than its weight, such as an adapted one."""

    def matrix(self) -> Tensor: ...


def matrix_of(linear: nn.Linear) -> Tensor:
    """The matrix that a linear layer multiplies by."""
    return linear.matrix() if isinstance(linear, HasMatrix) else linear.weight


class LatentAttention(SelfAttention):
    """Attention over keys and values that are projected up from latents.

    Without a cache, it computes every head's keys `W_k c` and values `W_v c` from the latents c.

    With a cache, it stores only the latent and the rotary key: `kv_rank + rope_dim` elements per
    token. It attends to the latents, which all heads share: a head's score `q · (W_k c)` equals
    `(W_kᵀ q) · c`, and its output `Σ a W_v c` equals `W_v Σ a c`. Queries are therefore multiplied
    by `W_kᵀ` and outputs by `W_v` (2405.04434 §2.1.2).

    Args:
        d_model: width of the input and output.
        config: config of the attention.
        kernel: attention kernel.
    """

    multiplied_here = ("k_up_proj", "v_up_proj")
    attends_to_stored = False
    division: ClassVar[Divisions] = {
        "k_up_proj": "column",
        "v_up_proj": "column",
        "out_proj": "row",
    }

    def __init__(self, d_model: int, config: LatentAttentionConfig, kernel: Kernel) -> None:
        super().__init__()
        self.d_model = d_model
        self.n_heads = heads = config.n_heads
        self.nope_dim = config.nope_dim
        self.head_dim = config.nope_dim + config.rope_dim
        self.value_dim = config.value_dim
        self.pattern = config.reach()
        self.kernel = kernel
        self.kv_down_proj = nn.Linear(d_model, config.kv_rank, bias=config.qkv_bias)
        self.kv_norm = config.norm.build(config.kv_rank)
        self.k_rope_proj = nn.Linear(d_model, config.rope_dim, bias=config.qkv_bias)
        self.q_rotation = make_rotation(config.position, config.rope_dim)
        self.k_rotation = make_rotation(config.position, config.rope_dim)
        self.k_up_proj = nn.Linear(config.kv_rank, heads * config.nope_dim, bias=False)
        self.v_up_proj = nn.Linear(config.kv_rank, heads * config.value_dim, bias=False)
        self.out_proj = nn.Linear(heads * config.value_dim, d_model, bias=config.out_bias)

    @abstractmethod
    def queries(self, x: Hidden) -> HeadOutputs:
        """The concatenated queries of all heads."""

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        context = context or context_alone(x, self.d_model, cache)
        latent = self.kv_norm(self.kv_down_proj(x))
        return self.out_proj(
            context.by_part(self.mix, self.queries(x), latent, self.k_rope_proj(x), cache=cache)
        )

    def mix(
        self,
        q: SideBySide,
        latent: SideBySide,
        k_rope: SideBySide,
        context: Context,
        cache: CacheEntry | None,
    ) -> HeadOutputs:
        """The concatenated outputs of all heads.

        Args:
            q: concatenated queries of all heads, (batch, seq, heads · width).
            latent: latents of keys and values, (batch, seq, kv_rank).
            k_rope: the rotary key that all heads share, before its rotation, (batch, seq,
                rope_dim).
            context: context of the pass.
            cache: the layer's cache entry, or None.
        """
        q = split_heads(q, self.n_heads)
        q, q_rope = q[..., : self.nope_dim], q[..., self.nope_dim :]  # (batch, heads, seq, …)
        q_rope = self.q_rotation(q_rope, context)
        latent = latent.unsqueeze(1)  # (batch, 1, seq, kv_rank)
        k_rope = self.k_rotation(k_rope.unsqueeze(1), context)  # (batch, 1, seq, rope_dim)
        mask = context.mask(self.pattern, self.kernel, q.dtype)
        if cache is None:
            y = self.attend(q, q_rope, latent, k_rope, mask)
        else:
            latent, k_rope = cache.update(latent, k_rope)
            y = self.attend_to_latents(q, q_rope, latent, k_rope, mask)
        return y.transpose(1, 2).flatten(2)

    def attend(
        self, q: Queries, q_rope: RotaryQueries, latent: Latents, k_rope: RotaryKeys, mask: Any
    ) -> AttentionOutput:
        """Project the latents up to every head's keys and values, and attend to them."""
        k = split_heads(self.k_up_proj(latent.squeeze(1)), self.n_heads)
        v = split_heads(self.v_up_proj(latent.squeeze(1)), self.n_heads)
        k = torch.cat((k, k_rope.expand(-1, self.n_heads, -1, -1)), dim=-1)
        return self.kernel(torch.cat((q, q_rope), dim=-1), k, v, mask)

    def attend_to_latents(
        self, q: Queries, q_rope: RotaryQueries, latent: Latents, k_rope: RotaryKeys, mask: Any
    ) -> AttentionOutput:
        """Compute the result of `attend`, up to rounding, without keys and values of each head.

        The projections to keys and values are applied to the queries and outputs instead of the
        latents.
        """
        rank = latent.shape[-1]
        w_k = matrix_of(self.k_up_proj).view(self.n_heads, -1, rank)  # (heads, nope_dim, kv_rank)
        w_v = matrix_of(self.v_up_proj).view(self.n_heads, -1, rank)  # (heads, value_dim, kv_rank)
        q = torch.cat((q @ w_k, q_rope), dim=-1)  # (batch, heads, seq, kv_rank + rope_dim)
        y = self.kernel(q, torch.cat((latent, k_rope), dim=-1), latent, mask)
        return y @ w_v.mT  # (batch, heads, seq, value_dim)


class DirectQueries(LatentAttention):
    """Latent attention with queries projected from the input."""

    division: ClassVar[Divisions] = {"q_proj": "column", **LatentAttention.division}

    def __init__(self, d_model: int, config: LatentAttentionConfig, kernel: Kernel) -> None:
        super().__init__(d_model, config, kernel)
        self.q_proj = nn.Linear(d_model, self.n_heads * self.head_dim, bias=False)

    def queries(self, x: Hidden) -> HeadOutputs:
        return self.q_proj(x)


class LatentQueries(LatentAttention):
    """Latent attention with queries that are also projected from a latent."""

    division: ClassVar[Divisions] = {"q_up_proj": "column", **LatentAttention.division}

    def __init__(
        self, d_model: int, config: LatentAttentionConfig, kernel: Kernel, q_rank: int
    ) -> None:
        super().__init__(d_model, config, kernel)
        self.q_down_proj = nn.Linear(d_model, q_rank, bias=config.qkv_bias)
        self.q_norm = config.norm.build(q_rank)
        self.q_up_proj = nn.Linear(q_rank, self.n_heads * self.head_dim, bias=False)

    def queries(self, x: Hidden) -> HeadOutputs:
        return self.q_up_proj(self.q_norm(self.q_down_proj(x)))
