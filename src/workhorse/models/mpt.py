"""MPT: MosaicML's MPT-7B and MPT-30B (2023), as llm-foundry trains them."""

import math
from functools import partial

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.alibi import AlibiConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import HeInitConfig
from workhorse.nn.norms import LayerNormConfig


def mpt(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50432,
    max_seq_len: int = 2048,
) -> DecoderConfig:
    """GPT-2's block with ALiBi instead of positions, no biases and LayerNorm in low precision."""
    norm = LayerNormConfig(eps=1e-5, bias=False, precision="low")
    block = PreNormConfig(
        norm=norm,
        attention=AttentionConfig(n_heads=n_heads, position=AlibiConfig(max_bias=8.0)),
        feed_forward=MlpConfig(d_ff=4 * d_model, activation="gelu"),
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=HeInitConfig(embedding_std=math.sqrt(2 / d_model), residual="scaled"),
    )


SOURCE = "the released model card and config.json"
PADDED = (
    "The tokenizer has 50,277 tokens; the embedding is padded to 50,432, which is counted.",
    "The released configs clip neither q, k nor v (an early one of the 30B's chat model has 6).",
)

PRESETS = (
    Preset(
        "mpt-7b",
        partial(mpt, d_model=4096, n_layers=32, n_heads=32),
        parameters=6_649_286_656,
        exactness="released",
        printed="6.7B",
        source=SOURCE,
        notes=("The card prints 6.7B; the released shape holds 6.65B.", *PADDED),
    ),
    Preset(
        "mpt-30b",
        partial(mpt, d_model=7168, n_layers=48, n_heads=64, max_seq_len=8192),
        parameters=29_957_200_896,
        exactness="released",
        printed="29.95B",
        source=SOURCE,
        notes=("The card prints 29.95B; the released shape holds 29.957B.", *PADDED),
    ),
)
