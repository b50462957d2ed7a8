"""Gemma: Open Models Based on Gemini Research and Technology (Gemma Team, 2403.08295)."""

import math
from functools import partial

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.feedforward import GatedMlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import NormalInitConfig
from workhorse.nn.norms import RMSNormConfig
from workhorse.nn.rope import RopeConfig


def gemma(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    head_dim: int = 256,
    vocab_size: int = 256_000,
    max_seq_len: int = 8192,
) -> DecoderConfig:
    """Pre-norm with RMSNorm around 1, GeGLU, wide heads and embeddings times `sqrt(d_model)`."""
    norm = RMSNormConfig(eps=1e-6, offset=True, multiply="before_cast")
    block = PreNormConfig(
        norm=norm,
        attention=AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            position=RopeConfig(theta=10_000.0),
        ),
        feed_forward=GatedMlpConfig(d_ff=d_ff, activation="gelu_tanh"),
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=EmbeddingConfig(multiplier=math.sqrt(d_model)),
        blocks={"main": block},
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=NormalInitConfig(std=0.02, residual="plain"),
    )


SOURCE = "2403.08295 Tables 1 and 2; the released config.json"
REPORT = (
    "The report prints a vocabulary of 256,128, with which its Table 2 agrees; the released "
    "embedding has 256,000 rows.",
    "The report counts the feed-forward's two input branches together: twice the width here.",
    "The report speaks of norms on input and output of each sub-layer; the released model has "
    "them on the input only (Gemma 2 has both).",
    "Early configs say 'gelu', the exact form; the model was trained with the tanh form.",
)

PRESETS = (
    Preset(
        "gemma-2b",
        partial(gemma, d_model=2048, n_layers=18, n_heads=8, n_kv_heads=1, d_ff=16384),
        parameters=2_506_172_416,
        exactness="released",
        printed="2B",
        source=SOURCE,
        notes=("Named 2B; it holds 2.51B, 1.98B of them outside the embedding.", *REPORT),
    ),
    Preset(
        "gemma-7b",
        partial(gemma, d_model=3072, n_layers=28, n_heads=16, n_kv_heads=16, d_ff=24576),
        parameters=8_537_680_896,
        exactness="released",
        printed="7B",
        source=SOURCE,
        notes=("Named 7B; it holds 8.54B, 7.75B of them outside the embedding.", *REPORT),
    ),
)
