"""IQuest-Coder (IQuest Lab, 2026): LLaMA with wide heads."""

from workhorse import nn
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an IQuest-Coder config: LLaMA, as in transformers.

    Options that only the original code implements raise an error.
    """
    hf.refuse("clip_qkv", None, "transformers does not clip in this model")
    hf.refuse("use_sliding_window", False, "transformers has no window in this model")
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias = hf.get("attention_bias", False)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.optional("num_key_value_heads", int, 8),
            head_dim=hf.optional("head_dim", int, 128),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=hf.get("mlp_bias", False)),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="iquestcoder",
        architecture="LlamaForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {"attention_bias": "block.attention.qkv_bias", "mlp_bias": "block.feed_forward.bias"},
        rules=llama_like.RULES,
    ),
)
