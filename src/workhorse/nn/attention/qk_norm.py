"""Norms on queries and keys (2302.05442 §2.2), before or after their rotation."""

from typing import Literal

import torch
from torch import nn

from workhorse.config.base import Config
from workhorse.nn.attention.self_attention import split_heads
from workhorse.nn.context import Context
from workhorse.nn.norms import NormConfig, PresentNormConfig
from workhorse.nn.shapes import Queries


class QKNormConfig(Config):
    """Norms on queries and keys (2302.05442 §2.2), which keep the scores bounded."""

    norm: PresentNormConfig
    """The kind of norm; queries and keys have separate weights."""
    over: Literal["head", "each_head", "full"] = "head"
    """`head` normalises each head, with one weight shared by all heads; `each_head` gives every
    head its own weight (Cohere, StableLM); `full` normalises all heads together (OLMo 2)."""
    after_rope: bool = False
    """Normalise after the rotation (HunYuan) rather than before."""


def norm_then_rotate(x: Queries, norm: nn.Module, rotation: nn.Module, context: Context) -> Queries:
    """The usual order, for queries and for keys alike."""
    return rotation(norm(x), context)


def rotate_then_norm(x: Queries, norm: nn.Module, rotation: nn.Module, context: Context) -> Queries:
    """The order of HunYuan and Llama 4."""
    return norm(rotation(x, context))


def make_head_norm(config: QKNormConfig | None, heads: int, head_dim: int) -> nn.Module:
    """A norm for `(batch, heads, seq, head_dim)`."""
    if config is None:
        return nn.Identity()
    match config.over:
        case "head":
            return config.norm.build(head_dim)
        case "each_head":
            return EachHeadNorm(config.norm, heads, head_dim)
        case "full":
            return AllHeadsNorm(config.norm, heads * head_dim)


class EachHeadNorm(nn.Module):
    """A norm over each head's width, every head with its own weights."""

    def __init__(self, config: NormConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(config.build(head_dim) for _ in range(heads))

    def forward(self, x: Queries) -> Queries:
        return torch.stack([norm(x[:, head]) for head, norm in enumerate(self.heads)], dim=1)


class AllHeadsNorm(nn.Module):
    """A norm over all heads' features together."""

    def __init__(self, config: NormConfig, width: int) -> None:
        super().__init__()
        self.norm = config.build(width)

    def forward(self, x: Queries) -> Queries:
        return split_heads(self.norm(x.transpose(1, 2).flatten(2)), x.shape[1])
