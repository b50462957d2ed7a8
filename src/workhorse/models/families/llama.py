"""LLaMA: Open and Efficient Foundation Language Models (Touvron et al., 2302.13971)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def llama(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    n_kv_heads: int | None = None,
    eps: float = 1e-6,
    vocab_size: int = 32000,
    max_seq_len: int = 2048,
) -> nn.DecoderConfig:
    """Build a LLaMA config: RMSNorm, RoPE and SwiGLU; no biases, no dropout, an untied head.

    RoPE pairs feature i with i + head_dim/2, as the Hugging Face checkpoints need. Meta's own files
    pair adjacent features. The two differ by a fixed permutation of the rows of q_proj and k_proj.
    """
    norm = nn.RMSNormConfig(eps=eps, multiply="after_cast")
    block = nn.PreNormConfig(
        norm=norm,
        attention=nn.AttentionConfig(
            n_heads=n_heads, n_kv_heads=n_kv_heads, position=nn.RopeConfig(theta=10_000.0)
        ),
        feed_forward=nn.GatedMlpConfig(d_ff=d_ff, activation="silu"),
    )
    return nn.DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        max_seq_len=max_seq_len,
        blocks={"main": block},
        final_norm=norm,
        init=nn.NormalInitConfig(std=0.02, residual="plain"),
    )


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a LLaMA config of any generation; Llama 3 only adds a RoPE scaling."""
    norm = llama_like.rms_norm(hf)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
