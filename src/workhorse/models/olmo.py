"""OLMo: Accelerating the Science of Language Models (Groeneveld et al., 2402.00838)."""

from functools import partial

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.feedforward import GatedMlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import FanInInitConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.rope import RopeConfig


def olmo(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    tied: bool = False,
    vocab_size: int = 50304,
    max_seq_len: int = 2048,
) -> DecoderConfig:
    """LLaMA's block with LayerNorm that has neither weight nor bias and computes in float32.

    Weights start at a width of `1/sqrt(fan_in)`, those onto the residual stream smaller. The
    original divides the latter by `sqrt(2 · layer)`, layer by layer, and cuts the tails at three
    deviations; here all are divided by `sqrt(2 · n_layers)` and nothing is cut.
    """
    norm = LayerNormConfig(eps=1e-5, weight=False, bias=False, precision="float32")
    block = PreNormConfig(
        norm=norm,
        attention=AttentionConfig(n_heads=n_heads, position=RopeConfig(theta=10_000.0)),
        feed_forward=GatedMlpConfig(d_ff=d_ff, activation="silu"),
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        head=HeadConfig(tied=tied),
        init=FanInInitConfig(embedding_std=d_model**-0.5, residual="scaled"),
    )


SOURCE = "2402.00838 Table 1; the training configs released in allenai/OLMo"
PADDED = "The tokenizer has 50,280 tokens; the embedding is padded to 50,304, which is counted."

PRESETS = (
    Preset(
        "olmo-1b",
        partial(olmo, d_model=2048, n_layers=16, n_heads=16, d_ff=8192, tied=True),
        parameters=1_176_764_416,
        exactness="released",
        printed="1B",
        source=SOURCE,
        notes=(
            PADDED,
            "The paper's feed-forward width, 8/3 · d rounded up to a multiple of 128, would be "
            "5504; the released model has 8192.",
        ),
    ),
    Preset(
        "olmo-7b",
        partial(olmo, d_model=4096, n_layers=32, n_heads=32, d_ff=11008),
        parameters=6_888_095_744,
        exactness="released",
        printed="7B",
        source=SOURCE,
        notes=(PADDED,),
    ),
    Preset(
        "olmo-65b",
        partial(olmo, d_model=8192, n_layers=80, n_heads=64, d_ff=22016),
        parameters=65_584_234_496,
        exactness="released",
        printed="65B",
        source=SOURCE,
        notes=(
            PADDED,
            "Its weights were not released; the training config (mitchish65.yaml) was. That config "
            "has a feed-forward width of 22,016, which makes 65.58B; the paper's rule, 8/3 · d "
            "rounded up to a multiple of 128, gives 21,888 and 65.33B.",
        ),
    ),
)
