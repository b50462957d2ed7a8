"""The language model of Aria (Rhymes AI, 2410.05993), a multimodal mixture of experts."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    attention,
    decoder,
    gated_mlp,
    rms_norm,
    written_activation,
)
from workhorse.models.huggingface.mixtures import (
    FEED_FORWARD,
    MLP,
    SHARED_RULES,
    n_shared_experts,
)
from workhorse.models.huggingface.moves import instead, joined, same, then_transposed, transposed
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a config of Aria's language model: LLaMA with a mixture of experts in every layer.

    The shared experts are read as one wide expert.
    """
    norm, bias = rms_norm(hf), hf.get("attention_bias", False)
    d_ff, n_shared = hf.need("intermediate_size", int), hf.get("moe_num_shared_experts", 2)
    block = PreNormConfig(
        norm=norm,
        attention=attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=MoEConfig(
            n_experts=hf.get("moe_num_experts", 8),
            top_k=hf.get("moe_topk", 2),
            d_ff=d_ff,  # always silu; only the shared expert uses `hidden_act`
            router=RouterConfig(normalize=True),
            shared=gated_mlp(hf, d_ff=n_shared * d_ff, bias=hf.get("mlp_bias", False)),
        ),
    )
    return decoder(hf, block, norm)


EXPERTS = FEED_FORWARD + "experts."

HUGGING_FACE = (
    Family(
        model_type="aria_text",
        architecture="AriaTextForCausalLM",
        read=read,
        keys=KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.shared.bias",
            "hidden_act": written_activation("block.feed_forward.shared.activation"),
            "moe_num_experts": "block.feed_forward.n_experts",
            "moe_topk": "block.feed_forward.top_k",
            "moe_num_shared_experts": n_shared_experts,
        },
        rules=instead(
            same(FEED_FORWARD + "router.proj", MLP + "router"),
            then_transposed(
                joined((EXPERTS + "gate_proj", EXPERTS + "up_proj"), MLP + "experts.fc1", dim=1)
            ),
            transposed(EXPERTS + "down_proj", MLP + "experts.fc2"),
            *SHARED_RULES,
            base=RULES,
        ),
    ),
)
