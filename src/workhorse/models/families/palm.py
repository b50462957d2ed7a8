"""PaLM: Scaling Language Modeling with Pathways (Chowdhery et al., 2204.02311)."""

import math

from workhorse import nn


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
