"""Helium 1 (Kyutai, 2025)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Helium config: LLaMA with RoPE on pairs of adjacent features."""
    norm = llama_like.rms_norm(hf, eps=1e-8, multiply="before_cast")
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 20),
            head_dim=hf.get("head_dim", 128),
            position=read_rope(hf, theta=100_000.0, pairing="interleaved"),
            qkv_bias=hf.get("attention_bias", False),
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="helium",
        architecture="HeliumForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
