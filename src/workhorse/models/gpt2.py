"""GPT-2: Language Models are Unsupervised Multitask Learners (Radford et al., 2019)."""

from functools import partial

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import NormalInitConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.positions import LearnedPositionConfig


def gpt2(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50257,
    max_seq_len: int = 1024,
    dropout: float = 0.1,
) -> DecoderConfig:
    """GPT with the norms moved to each sub-layer's input and one more before the head."""
    norm = LayerNormConfig(eps=1e-5)
    block = PreNormConfig(
        norm=norm,
        attention=AttentionConfig(n_heads=n_heads, qkv_bias=True, out_bias=True, dropout=dropout),
        feed_forward=MlpConfig(d_ff=4 * d_model, activation="gelu_tanh", bias=True),
        dropout=dropout,
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=EmbeddingConfig(position=LearnedPositionConfig(), dropout=dropout),
        blocks={"main": block},
        final_norm=norm,
        head=HeadConfig(tied=True),
        init=NormalInitConfig(std=0.02, residual="scaled"),
    )


SOURCE = "Radford et al. 2019 Table 2; the hparams.json released in openai/gpt-2"
WRONG_COUNT = (
    "The paper prints {printed} for a shape that holds {exact}; the authors' repository says that "
    "the paper's counts were wrong."
)
HEADS = "The paper prints no number of heads; the released hparams.json has it."

PRESETS = (
    Preset(
        "gpt2",
        partial(gpt2, d_model=768, n_layers=12, n_heads=12),
        parameters=124_439_808,
        exactness="released",
        printed="117M",
        source=SOURCE,
        notes=(WRONG_COUNT.format(printed="117M", exact="124.4M"), HEADS),
    ),
    Preset(
        "gpt2-medium",
        partial(gpt2, d_model=1024, n_layers=24, n_heads=16),
        parameters=354_823_168,
        exactness="released",
        printed="345M",
        source=SOURCE,
        notes=(WRONG_COUNT.format(printed="345M", exact="354.8M"), HEADS),
    ),
    Preset(
        "gpt2-large",
        partial(gpt2, d_model=1280, n_layers=36, n_heads=20),
        parameters=774_030_080,
        exactness="released",
        printed="762M",
        source=SOURCE,
        notes=(WRONG_COUNT.format(printed="762M", exact="774.0M"), HEADS),
    ),
    Preset(
        "gpt2-xl",
        partial(gpt2, d_model=1600, n_layers=48, n_heads=25),
        parameters=1_557_611_200,
        exactness="released",
        printed="1542M",
        source=SOURCE,
        notes=(WRONG_COUNT.format(printed="1542M", exact="1557.6M"), HEADS),
    ),
)
