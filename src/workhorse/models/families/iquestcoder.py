"""IQuest-Coder (IQuest Lab, 2026): LLaMA with wide heads."""

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
    """Read an IQuest-Coder config: LLaMA, as in transformers.

    Options that only the original code implements raise an error.
    """
    hf.refuse("clip_qkv", None, "transformers does not clip in this model")
    hf.refuse("use_sliding_window", False, "transformers has no window in this model")
    norm = rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    block = PreNormConfig(
        norm=norm,
        attention=attention(
            hf,
            n_kv_heads=hf.optional("num_key_value_heads", int, 8),
            head_dim=hf.optional("head_dim", int, 128),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=gated_mlp(hf, bias=hf.get("mlp_bias", False)),
    )
    return decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="iquestcoder",
        architecture="LlamaForCausalLM",
        read=read,
        keys=KEYS
        | {"attention_bias": "block.attention.qkv_bias", "mlp_bias": "block.feed_forward.bias"},
        rules=RULES,
    ),
)
