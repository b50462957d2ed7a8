"""GPT-3: Language Models are Few-Shot Learners (Brown et al., 2005.14165)."""

from workhorse import nn

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
