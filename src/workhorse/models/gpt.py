"""GPT: Improving Language Understanding by Generative Pre-Training (Radford et al., 2018)."""

from functools import partial

from workhorse.models.preset import Preset
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.blocks import PostNormConfig
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.init import NormalInitConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.nn.positions import LearnedPositionConfig


def gpt(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 40478,
    max_seq_len: int = 512,
    dropout: float = 0.1,
) -> DecoderConfig:
    """Post-norm blocks as in 2017, with learned positions and tanh GELU; no final norm."""
    block = PostNormConfig(
        norm=LayerNormConfig(eps=1e-5),
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
        head=HeadConfig(tied=True),
        init=NormalInitConfig(std=0.02, residual="plain"),
    )


PRESETS = (
    Preset(
        "gpt",
        partial(gpt, d_model=768, n_layers=12, n_heads=12),
        parameters=116_534_784,
        exactness="released",
        source="Radford et al. 2018 §4.1; openai/finetune-transformer-lm (vocabulary 40,478)",
        notes=(
            "The paper prints no count. The 117M often quoted for it is this number rounded.",
            "The vocabulary is 40,000 merges over 478 base symbols; the tokens that fine-tuning "
            "adds are not part of it.",
        ),
    ),
)
