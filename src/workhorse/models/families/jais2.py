"""Jais 2 (Inception, MBZUAI and Cerebras, 2025)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Jais 2 config: LayerNorm, biases everywhere, an ungated squared ReLU, and RoPE."""
    norm = nn.LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    bias = hf.get("attention_bias", True)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=nn.MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=llama_like.activation(hf, default="relu2"),
            bias=hf.get("mlp_bias", True),
        ),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="jais2",
        architecture="Jais2ForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key != "rms_norm_eps"}
        | {
            "layer_norm_eps": "final_norm.eps",
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=llama_like.RULES,
    ),
)
