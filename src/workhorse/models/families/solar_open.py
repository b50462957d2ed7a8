"""Solar Open Technical Report (Upstage, 2601.07022)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Solar Open config: LLaMA's attention, and DeepSeek-V3's mixture in every layer."""
    hf.refuse("first_k_dense_replace", 0, "every layer of Solar Open has a mixture")
    hf.refuse("use_qk_norm", False, "Solar Open in transformers has no norms on queries and keys")
    hf.ignore("intermediate_size")  # width of dense layers, which Solar Open does not have
    norm = llama_like.rms_norm(hf, eps=1e-5)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=hf.get("head_dim", 128),
            position=read_rope(hf, theta=1e6),
            qkv_bias=hf.get("attention_bias", False),
        ),
        feed_forward=mixtures.sigmoid_mixture(hf, n_experts=128, top_k=8, d_ff=1280),
    )
    return llama_like.decoder(hf, block, norm)


ABSENT = ("intermediate_size", "first_k_dense_replace")
"""Shared keys that are not written, because Solar Open has no dense layers."""

HUGGING_FACE = (
    Family(
        model_type="solar_open",
        architecture="SolarOpenForCausalLM",
        read=read,
        keys={
            key: path
            for key, path in (
                llama_like.KEYS | mixtures.MIXTURE_KEYS | mixtures.ROUTER_KEYS
            ).items()
            if key not in ABSENT
        }
        | {"attention_bias": "block.attention.qkv_bias"},
        rules=instead(*mixtures.MIXTURE_RULES, base=llama_like.RULES),
    ),
)
