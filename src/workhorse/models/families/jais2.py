"""Jais 2 (Inception, MBZUAI and Cerebras, 2025)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import KEYS, RULES, activation, attention, decoder
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.norms import LayerNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Jais 2 config: LayerNorm, biases everywhere, an ungated squared ReLU, and RoPE."""
    norm = LayerNormConfig(eps=hf.get("layer_norm_eps", 1e-5))
    bias = hf.get("attention_bias", True)
    block = PreNormConfig(
        norm=norm,
        attention=attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=MlpConfig(
            d_ff=hf.need("intermediate_size", int),
            activation=activation(hf, default="relu2"),
            bias=hf.get("mlp_bias", True),
        ),
    )
    return decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="jais2",
        architecture="Jais2ForCausalLM",
        read=read,
        keys={key: path for key, path in KEYS.items() if key != "rms_norm_eps"}
        | {
            "layer_norm_eps": "final_norm.eps",
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
        },
        rules=RULES,
    ),
)
