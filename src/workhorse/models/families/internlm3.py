"""InternLM3 (Shanghai AI Laboratory, 2025)."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an InternLM3 config: LLaMA with biases everywhere or nowhere.

    Raises:
        ConfigError: only some of the biases are enabled, which transformers does not load.
    """
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias, others = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    if bias != others:
        raise ConfigError(
            f"{hf.where}: attention_bias={bias} and mlp_bias={others} (qkv_bias and bias in "
            "InternLM's own files) differ; set both to the same value"
        )
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.optional("num_key_value_heads", int, 2),
            head_dim=hf.optional("head_dim", int, 128),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=llama_like.gated_mlp(hf, bias=bias),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="internlm3",
        architecture="LlamaForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {"attention_bias": "block.attention.qkv_bias", "mlp_bias": "block.feed_forward.bias"},
        rules=llama_like.RULES,
    ),
)
