"""PaLM: Scaling Language Modeling with Pathways (Chowdhery et al., 2204.02311)."""

import math
from functools import partial

from workhorse import nn
from workhorse.models.preset import Preset


def palm(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    head_dim: int = 256,
    vocab_size: int = 256_000,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build a PaLM config: parallel blocks, SwiGLU of width 4d, multi-query, no biases (§2).

    Embeddings start with deviation 1, so the tied head divides its logits by `sqrt(d_model)` (§5).
    """
    norm = nn.LayerNormConfig(eps=1e-6, bias=False)
    block = nn.ParallelConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads,
            n_kv_heads=1,
            head_dim=head_dim,
            position=nn.RopeConfig(theta=10_000.0),
        ),
        feed_forward=nn.GatedMlpConfig(d_ff=4 * d_model, activation="silu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=nn.HeadConfig(tied=True, multiplier=1 / math.sqrt(d_model)),
        init=nn.FanInInitConfig(embedding_std=1.0, residual="plain"),
    )


SOURCE = "2204.02311 Table 1"
SILENT = (
    "Never released. The paper gives neither LayerNorm's eps (1e-6 here, as in T5X) nor the "
    "pairing of the rotation (halves here). Its '256k' vocabulary is 256,000: only that matches "
    "its counts."
)

PRESETS = (
    Preset(
        "palm-8b",
        partial(palm, d_model=4096, n_layers=32, n_heads=16),
        parameters=8_632_012_800,
        exactness="printed",
        printed="8.63B",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "palm-62b",
        partial(palm, d_model=8192, n_layers=64, n_heads=32),
        parameters=62_495_662_080,
        exactness="printed",
        printed="62.50B",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "palm-540b",
        partial(palm, d_model=18432, n_layers=118, n_heads=48),
        parameters=540_356_474_880,
        exactness="printed",
        printed="540.35B",
        source=SOURCE,
        notes=(
            SILENT,
            "Its 48 heads of 256 make 12,288, narrower than d_model = 18,432, as printed.",
            "540.35B is the count without the norms' weights; with them it is 540.356B.",
        ),
    ),
)
