"""Arcee AFM-4.5B (2025): LLaMA with an ungated feed-forward of squared ReLUs."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    activation,
    attention,
    decoder,
    rms_norm,
)
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.feedforward import MlpConfig


def read(hf: Fields) -> DecoderConfig:
    """Read an Arcee config: LLaMA with an ungated feed-forward of squared ReLUs."""
    norm = rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    block = PreNormConfig(
        norm=norm,
        attention=attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=activation(hf, default="relu2"),
            bias=hf.get("mlp_bias", False),
        ),
    )
    return decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="arcee",
        architecture="ArceeForCausalLM",
        read=read,
        keys=KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=RULES,
    ),
)
