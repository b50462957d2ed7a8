"""FlexOlmo: Open Language Models for Flexible Data Use (2507.07024)."""

from workhorse.models.families.olmo import BIAS, QK_NORM, REORDERED
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
from workhorse.models.huggingface.mixtures import MIXTURE_RULES
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import ReorderedNormConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a FlexOlmo config: OLMo 2 with a mixture of experts in every layer."""
    norm = rms_norm(hf, multiply="before_cast")
    bias = hf.get("attention_bias", False)
    block = ReorderedNormConfig(
        norm=norm,
        attention=attention(
            hf,
            position=read_rope(hf, theta=5e5, precision="float32"),
            qk_norm=QKNormConfig(norm=norm, over="full"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=MoEConfig(
            n_experts=hf.get("num_experts", 7),
            top_k=hf.get("num_experts_per_tok", 5),
            d_ff=hf.need("intermediate_size", int),
            activation=activation(hf),
            router=RouterConfig(normalize=hf.get("norm_topk_prob", False)),
        ),
    )
    return decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        read=read,
        keys=KEYS
        | BIAS
        | {
            "num_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "norm_topk_prob": "block.feed_forward.router.normalize",
        },
        rules=instead(*QK_NORM, *REORDERED, *MIXTURE_RULES, base=RULES),
    ),
)
