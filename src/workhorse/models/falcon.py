"""Falcon: The Falcon Series of Open Language Models (Almazrouei et al., 2311.16867)."""

from functools import partial
from typing import Literal

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.blocks import ParallelConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import NormalInitConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.rope import RopeConfig


def falcon(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    norms: Literal[1, 2],
    vocab_size: int = 65024,
    max_seq_len: int = 2048,
) -> DecoderConfig:
    """Parallel blocks with rotary positions, few key-value heads, exact GELU and no biases.

    The 7B shares one norm between attention and feed-forward; the larger ones have one for each.
    """
    norm = LayerNormConfig(eps=1e-5)
    block = ParallelConfig(
        norm=norm,
        norms=norms,
        attention=AttentionConfig(
            n_heads=n_heads, n_kv_heads=n_kv_heads, position=RopeConfig(theta=10_000.0)
        ),
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
        init=NormalInitConfig(std=0.02, residual="plain"),
    )


SOURCE = "2311.16867 §5; the released config.json"
TIED = (
    "The head is tied, but the released files hold a second copy of its matrix: {stored} numbers."
)

PRESETS = (
    Preset(
        "falcon-7b",
        partial(falcon, d_model=4544, n_layers=32, n_heads=71, n_kv_heads=1, norms=1),
        parameters=6_921_720_704,
        exactness="released",
        printed="7B",
        source=SOURCE,
        notes=(TIED.format(stored="7,217,189,760"),),
    ),
    Preset(
        "falcon-40b",
        partial(falcon, d_model=8192, n_layers=60, n_heads=128, n_kv_heads=8, norms=2),
        parameters=41_303_293_952,
        exactness="released",
        printed="40B",
        source=SOURCE,
        notes=(
            TIED.format(stored="41,835,970,560"),
            "Printed as 40B; the released shape holds 41.3B.",
        ),
    ),
    Preset(
        "falcon-180b",
        partial(falcon, d_model=14848, n_layers=80, n_heads=232, n_kv_heads=8, norms=2),
        parameters=178_557_088_768,
        exactness="released",
        printed="180B",
        source=SOURCE,
        notes=(
            TIED.format(stored="179,522,565,120"),
            "Printed as 180B, which only the files with the copy round to; the model holds 178.6B.",
        ),
    ),
)
