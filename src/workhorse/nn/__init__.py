"""Modules of decoder-only transformers: attention, feed-forward, norms, positions, KV caches."""

from workhorse.nn.attention.grouped import Attention, AttentionConfig
from workhorse.nn.cache.contiguous import Cache
from workhorse.nn.context import Context
from workhorse.nn.decoder import Decoder, DecoderConfig, evaluation_mode
from workhorse.nn.logprobs import IGNORE, HeadLoss, Logprobs, TokenLogprobs, next_token_loss

__all__ = [
    "IGNORE",
    "Attention",
    "AttentionConfig",
    "Cache",
    "Context",
    "Decoder",
    "DecoderConfig",
    "HeadLoss",
    "Logprobs",
    "TokenLogprobs",
    "evaluation_mode",
    "next_token_loss",
]
