"""The decoder of Attention Is All You Need (Vaswani et al., 1706.03762), without its encoder."""

import math

from workhorse import nn


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
