"""Seed-OSS (ByteDance Seed, 2025)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    attention,
    decoder,
    gated_mlp,
    rms_norm,
)
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Seed-OSS config: LLaMA with biases on queries, keys and values."""
    norm = rms_norm(hf)
    block = PreNormConfig(
        norm=norm,
        attention=attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=hf.optional("head_dim", int, 128),
            qkv_bias=hf.get("attention_bias", True),
            out_bias=hf.get("attention_out_bias", False),
            dropout=hf.get("attention_dropout", 0.1),
        ),
        feed_forward=gated_mlp(hf, bias=hf.get("mlp_bias", False)),
        dropout=hf.get("residual_dropout", 0.1),
    )
    return decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        read=read,
        keys=KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "attention_out_bias": "block.attention.out_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=RULES,
    ),
)
