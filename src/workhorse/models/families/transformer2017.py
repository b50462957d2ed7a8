"""The decoder of Attention Is All You Need (Vaswani et al., 1706.03762), without its encoder."""

import math
from functools import partial

from workhorse import nn
from workhorse.models.preset import Preset


def transformer2017(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    dropout: float,
    vocab_size: int = 37000,
    max_seq_len: int = 256,
) -> nn.DecoderConfig:
    """Build a config of the 2017 decoder: post-norm, sinusoids, ReLU; no encoder.

    Dropout is on sub-layer outputs and on the sum of embedding and position, as in §5.4.
    """
    block = nn.PostNormConfig(
        norm=nn.LayerNormConfig(eps=1e-6),
        attention=nn.AttentionConfig(n_heads=n_heads),
        feed_forward=nn.MlpConfig(d_ff=d_ff, activation="relu", bias=True),
        dropout=dropout,
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        embedding=nn.EmbeddingConfig(
            position=nn.SinusoidalPositionConfig(), multiplier=math.sqrt(d_model), dropout=dropout
        ),
        blocks={"main": block},
        head=nn.HeadConfig(tied=True),
        init=nn.XavierInitConfig(embedding_std=d_model**-0.5, residual="plain"),
    )


SOURCE = "1706.03762 Table 3; tensor2tensor's hyperparameters where the paper is silent"
SILENT = (
    "Values that the paper does not give are tensor2tensor's: no biases in attention, LayerNorm's "
    "eps 1e-6, sequences of up to 256 tokens. The vocabulary of 37,000 is the paper's 'about "
    "37000' (§5.1)."
)
WHOLE = (
    "The paper prints {printed} for encoder and decoder together; its shape and a vocabulary of "
    "37,000 give {exact}. This preset is the decoder without its attention to the encoder."
)

PRESETS = (
    Preset(
        "transformer-2017",
        partial(transformer2017, d_model=512, n_layers=6, n_heads=8, d_ff=2048, dropout=0.1),
        parameters=37_846_016,
        exactness="derived",
        source=SOURCE,
        notes=(WHOLE.format(printed="65M", exact="63.0M"), SILENT),
    ),
    Preset(
        "transformer-2017-big",
        partial(transformer2017, d_model=1024, n_layers=6, n_heads=16, d_ff=4096, dropout=0.3),
        parameters=113_440_768,
        exactness="derived",
        source=SOURCE,
        notes=(
            WHOLE.format(printed="213M", exact="214.2M"),
            SILENT,
            "Dropout is 0.3 for English to German and 0.1 for English to French (§6.1); 0.3 here.",
        ),
    ),
)
