"""Arcee AFM-4.5B (2025): LLaMA with an ungated feed-forward of squared ReLUs."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an Arcee config: LLaMA with an ungated feed-forward of squared ReLUs."""
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=nn.MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=llama_like.activation(hf, default="relu2"),
            bias=hf.get("mlp_bias", False),
        ),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="arcee",
        architecture="ArceeForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
