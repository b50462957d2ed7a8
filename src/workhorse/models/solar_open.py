"""Solar Open Technical Report (Upstage, 2601.07022)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    activation,
    attention,
    decoder,
    gated_mlp,
    rms_norm,
)
from workhorse.models.huggingface.mixtures import (
    MIXTURE_KEYS,
    MIXTURE_RULES,
    ROUTER_KEYS,
    router_groups,
)
from workhorse.models.huggingface.names import instead
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.moe import MoEConfig
from workhorse.nn.router import RouterConfig


def read(hf: Fields) -> DecoderConfig:
    """DeepSeek-V3's mixture in every layer, behind LLaMA's attention."""
    hf.refuse("first_k_dense_replace", 0, "every layer is a mixture")
    hf.refuse("use_qk_norm", False, "transformers has no Solar Open with it")
    hf.ignore("intermediate_size")  # of layers that it does not have
    norm = rms_norm(hf, eps=1e-5)
    width = hf.get("moe_intermediate_size", 1280)
    block = PreNormConfig(
        norm=norm,
        attention=attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 8),
            head_dim=hf.get("head_dim", 128),
            position=read_rope(hf, theta=1e6),
            qkv_bias=hf.get("attention_bias", False),
        ),
        feed_forward=MoEConfig(
            n_experts=hf.get("n_routed_experts", 128),
            top_k=hf.get("num_experts_per_tok", 8),
            d_ff=width,
            activation=activation(hf),
            router=RouterConfig(
                score="sigmoid",
                normalize=hf.get("norm_topk_prob", True),
                scale=hf.get("routed_scaling_factor", 1.0),
                selection_bias=True,
                **router_groups(hf),
            ),
            shared=gated_mlp(hf, d_ff=width * hf.get("n_shared_experts", 1)),
        ),
    )
    return decoder(hf, block, norm)


ABSENT = ("intermediate_size", "first_k_dense_replace")
"""Keys of the layers without a mixture that its relatives begin with."""

HUGGING_FACE = (
    Family(
        model_type="solar_open",
        architecture="SolarOpenForCausalLM",
        read=read,
        keys={
            key: place
            for key, place in (KEYS | MIXTURE_KEYS | ROUTER_KEYS).items()
            if key not in ABSENT
        }
        | {"attention_bias": "block.attention.qkv_bias"},
        rules=instead(*MIXTURE_RULES, base=RULES),
    ),
)
