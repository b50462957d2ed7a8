"""GPT-3: Language Models are Few-Shot Learners (Brown et al., 2005.14165)."""

from functools import partial

from workhorse import nn
from workhorse.models.preset import Preset

BAND = 256
"""Window of a locally banded layer. The paper does not give it; GPT-Neo's replication uses 256."""


def gpt3(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    head_dim: int,
    vocab_size: int = 50257,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build a GPT-3 config: GPT-2 with alternating dense and locally banded attention (§2.1).

    `head_dim` is a separate argument, because in some rows of the printed table it is not
    `d_model / n_heads`.
    """
    norm = nn.LayerNormConfig(eps=1e-5)
    feed_forward = nn.MlpConfig(d_ff=4 * d_model, activation="gelu_tanh", bias=True)
    dense = nn.AttentionConfig(n_heads=n_heads, head_dim=head_dim, qkv_bias=True, out_bias=True)
    banded = dense.replace(window=BAND)
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=nn.EmbeddingConfig(position=nn.LearnedPositionConfig()),
        blocks={
            "dense": nn.PreNormConfig(norm=norm, attention=dense, feed_forward=feed_forward),
            "banded": nn.PreNormConfig(norm=norm, attention=banded, feed_forward=feed_forward),
        },
        pattern=("dense", "banded"),
        final_norm=norm,
        head=nn.HeadConfig(tied=True),
        init=nn.NormalInitConfig(std=0.02, residual="scaled"),
    )


SOURCE = "2005.14165 Table 2.1 (shape) and Table D.1 (count)"
SILENT = (
    f"The paper gives no band width ({BAND} is our choice), does not say which kind of layer comes "
    "first (dense here), and mentions no dropout (none here)."
)

PRESETS = (
    Preset(
        "gpt3-125m",
        partial(gpt3, d_model=768, n_layers=12, n_heads=12, head_dim=64),
        parameters=125_226_240,
        exactness="printed",
        printed="125M",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "gpt3-350m",
        partial(gpt3, d_model=1024, n_layers=24, n_heads=16, head_dim=64),
        parameters=355_871_744,
        exactness="printed",
        printed="356M",
        source=SOURCE,
        notes=(SILENT, "Table 2.1 rounds the count to 350M."),
    ),
    Preset(
        "gpt3-760m",
        partial(gpt3, d_model=1536, n_layers=24, n_heads=16, head_dim=96),
        parameters=760_300_032,
        exactness="printed",
        printed="760M",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "gpt3-1.3b",
        partial(gpt3, d_model=2048, n_layers=24, n_heads=24, head_dim=128),
        parameters=1_517_123_584,
        exactness="printed",
        printed="1.32B",
        source=SOURCE,
        notes=(
            SILENT,
            "Table 2.1 prints 24 heads of 128, which is not d_model = 2048 and gives 1.52B. Table "
            "D.1 prints 1.32B (2.1: 1.3B). 16 heads of 128 would give 1.316B.",
        ),
    ),
    Preset(
        "gpt3-2.7b",
        partial(gpt3, d_model=2560, n_layers=32, n_heads=32, head_dim=80),
        parameters=2_651_553_280,
        exactness="printed",
        printed="2.65B",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "gpt3-6.7b",
        partial(gpt3, d_model=4096, n_layers=32, n_heads=32, head_dim=128),
        parameters=6_658_404_352,
        exactness="printed",
        printed="6.66B",
        source=SOURCE,
        notes=(SILENT,),
    ),
    Preset(
        "gpt3-13b",
        partial(gpt3, d_model=5140, n_layers=40, n_heads=40, head_dim=128),
        parameters=12_936_488_380,
        exactness="printed",
        printed="12.85B",
        source=SOURCE,
        notes=(
            SILENT,
            "Table 2.1 prints d_model = 5140 and 40 heads of 128 (5120), which gives 12.94B. "
            "Table D.1 prints 12.85B (2.1: 13.0B). d_model = 5120 would give 12.85B.",
        ),
    ),
    Preset(
        "gpt3-175b",
        partial(gpt3, d_model=12288, n_layers=96, n_heads=96, head_dim=128),
        parameters=174_604_259_328,
        exactness="printed",
        printed="174.6B",
        source=SOURCE,
        notes=(SILENT, "Table 2.1 rounds the count to 175.0B."),
    ),
)
