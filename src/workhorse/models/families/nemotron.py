"""Nemotron-4 and Minitron (2402.16819, 2407.14679)."""

from workhorse import nn
from workhorse.models.huggingface import gpt_like, llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Nemotron config: LayerNorm (1 + weight), squared ReLU, RoPE on half of each head."""
    norm = nn.LayerNormConfig(eps=hf.get("norm_eps", 1e-5), offset=True)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf, position=read_rope(hf, fraction=0.5), qkv_bias=bias, out_bias=bias
        ),
        feed_forward=gpt_like.mlp(hf, "relu2", bias=hf.get("mlp_bias", False)),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key != "rms_norm_eps"}
        | {
            "partial_rotary_factor": "block.attention.position.fraction",
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.bias",
            "norm_eps": "final_norm.eps",
        },
        rules=llama_like.RULES,
    ),
)
