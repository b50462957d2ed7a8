"""FlexOlmo: Open Language Models for Flexible Data Use (2507.07024)."""

from workhorse import nn
from workhorse.models.families.olmo import BIAS, QK_NORM, REORDERED
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a FlexOlmo config: OLMo 2 with a mixture of experts in every layer."""
    norm = llama_like.rms_norm(hf, multiply="before_cast")
    bias = hf.get("attention_bias", False)
    block = nn.ReorderedNormConfig(
        norm=norm,
        attention=llama_like.attention(
            hf,
            position=read_rope(hf, theta=5e5, precision="float32"),
            qk_norm=nn.QKNormConfig(norm=norm, over="full"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=nn.MoEConfig(
            n_experts=hf.get("num_experts", 7),
            top_k=hf.get("num_experts_per_tok", 5),
            d_ff=hf.need("intermediate_size", int),
            activation=llama_like.activation(hf),
            router=nn.RouterConfig(normalize=hf.get("norm_topk_prob", False)),
        ),
    )
    return llama_like.decoder(hf, block, norm)


HUGGING_FACE = (
    Family(
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | BIAS
        | {
            "num_experts": "block.feed_forward.n_experts",
            "num_experts_per_tok": "block.feed_forward.top_k",
            "norm_topk_prob": "block.feed_forward.router.normalize",
        },
        rules=instead(*QK_NORM, *REORDERED, *mixtures.MIXTURE_RULES, base=llama_like.RULES),
    ),
)
