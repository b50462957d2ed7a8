"""Modules of decoder-only transformers: attention, feed-forward, norms, positions, KV caches."""

from workhorse.nn.attention.grouped import Attention, AttentionConfig, QueryScalingConfig
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import (
    BlockConfig,
    FeedForwardConfig,
    ParallelConfig,
    PostNormConfig,
    PreNormConfig,
    ReorderedNormConfig,
    SandwichNormConfig,
)
from workhorse.nn.context import Context
from workhorse.nn.decoder import Decoder, DecoderConfig, evaluation_mode
from workhorse.nn.embedding import (
    EmbeddingConfig,
    EmbeddingPositionConfig,
    HeadConfig,
    HeadTransformConfig,
)
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig
from workhorse.nn.feedforward import (
    XIELU,
    ActivationName,
    ClampedSwigluConfig,
    GatedMlpConfig,
    MlpConfig,
)
from workhorse.nn.init import FanInInitConfig, HeInitConfig, NormalInitConfig, XavierInitConfig
from workhorse.nn.logprobs import IGNORE, HeadLoss, Logprobs, TokenLogprobs, next_token_loss
from workhorse.nn.norms import LayerNormConfig, NoNormConfig, RMSNormConfig
from workhorse.nn.positions.absolute import (
    AlibiConfig,
    LearnedPositionConfig,
    NoPositionConfig,
    SinusoidalPositionConfig,
)
from workhorse.nn.positions.rope import (
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    YarnScalingConfig,
)

__all__ = [
    "IGNORE",
    "XIELU",
    "ActivationName",
    "AlibiConfig",
    "Attention",
    "AttentionConfig",
    "BlockConfig",
    "ClampedSwigluConfig",
    "Context",
    "Decoder",
    "DecoderConfig",
    "EmbeddingConfig",
    "EmbeddingPositionConfig",
    "FanInInitConfig",
    "FeedForwardConfig",
    "GatedMlpConfig",
    "HeInitConfig",
    "HeadConfig",
    "HeadLoss",
    "HeadTransformConfig",
    "LatentAttentionConfig",
    "LayerNormConfig",
    "LearnedPositionConfig",
    "Llama3ScalingConfig",
    "Logprobs",
    "LongRopeScalingConfig",
    "MlpConfig",
    "MoEConfig",
    "NoNormConfig",
    "NoPositionConfig",
    "NormalInitConfig",
    "ParallelConfig",
    "PostNormConfig",
    "PreNormConfig",
    "QKNormConfig",
    "QueryScalingConfig",
    "RMSNormConfig",
    "ReorderedNormConfig",
    "RopeConfig",
    "RouterConfig",
    "SandwichNormConfig",
    "SinusoidalPositionConfig",
    "TokenLogprobs",
    "XavierInitConfig",
    "YarnScalingConfig",
    "evaluation_mode",
    "next_token_loss",
]
