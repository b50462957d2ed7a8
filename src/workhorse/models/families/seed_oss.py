"""Seed-OSS (ByteDance Seed, 2025)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Seed-OSS config: LLaMA with biases on queries, keys and values."""
    norm = llama_like.rms_norm(hf)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=hf.optional("head_dim", int, 128),
            qkv_bias=hf.get("attention_bias", True),
            out_bias=hf.get("attention_out_bias", False),
            dropout=hf.get("attention_dropout", 0.1),
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        dropout=hf.get("residual_dropout", 0.1),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "attention_out_bias": "block.attention.out_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
