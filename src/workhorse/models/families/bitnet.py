"""BitNet b1.58 2B4T (Microsoft, 2504.12285), with the weights before ternary rounding.

BitNet rounds weights to three values and activations to eight bits. This quantisation is not part
of the config here: a checkpoint declares it in its `quantization_config`.
"""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a BitNet config: LLaMA with squared ReLU and a norm before each output projection."""
    width, n_heads = hf.need("hidden_size", int), hf.need("num_attention_heads", int)
    hf.refuse("head_dim", width // n_heads, "the norm on the heads' outputs has width hidden_size")
    norm, bias = llama_like.rms_norm(hf, eps=1e-5), hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.optional("num_key_value_heads", int, 5),
            position=read_rope(hf, theta=5e5),
            qkv_bias=bias,
            out_bias=bias,
            inner_norm=norm,
        ),
        feed_forward=llama_like.gated_mlp(
            hf, activation=llama_like.activation(hf, default="relu2"), inner_norm=norm
        ),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="bitnet",
        architecture="BitNetForCausalLM",
        read=read,
        keys=llama_like.KEYS | {"attention_bias": "block.attention.qkv_bias"},
        rules=instead(
            same("layers.{i}.attention.inner_norm", "model.layers.{i}.self_attn.attn_sub_norm"),
            same("layers.{i}.feed_forward.inner_norm", "model.layers.{i}.mlp.ffn_sub_norm"),
            base=llama_like.RULES,
        ),
    ),
)
