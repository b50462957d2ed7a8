"""The transformer itself. It imports only PyTorch, `config` and `errors`."""

from workhorse.nn.attention.grouped import Attention, AttentionConfig
from workhorse.nn.cache.contiguous import Cache
from workhorse.nn.context import Context
from workhorse.nn.decoder import Decoder, DecoderConfig, evaluation_mode
from workhorse.nn.head_loss import HeadLoss
from workhorse.nn.logprobs import token_logprobs
from workhorse.nn.loss import (
    IGNORE,
    chunked_next_token_loss,
    chunked_next_token_losses,
    next_token_loss,
    next_token_losses,
)

__all__ = [
    "IGNORE",
    "Attention",
    "AttentionConfig",
    "Cache",
    "Context",
    "Decoder",
    "DecoderConfig",
    "HeadLoss",
    "chunked_next_token_loss",
    "chunked_next_token_losses",
    "evaluation_mode",
    "next_token_loss",
    "next_token_losses",
    "token_logprobs",
]
