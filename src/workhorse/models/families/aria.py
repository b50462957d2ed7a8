"""The language model of Aria (Rhymes AI, 2410.05993), a multimodal mixture of experts."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same, then_transposed, transposed


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a config of Aria's language model: LLaMA with a mixture of experts in every layer.

    The shared experts are read as one wide expert.
    """
    norm, bias = llama_like.rms_norm(hf), hf.get("attention_bias", False)
    d_ff, n_shared = hf.need("intermediate_size", int), hf.get("moe_num_shared_experts", 2)
    block = nn.PreNormConfig(
        norm=norm,
        attention=llama_like.attention(hf, qkv_bias=bias, out_bias=bias),
        feed_forward=nn.MoEConfig(
            n_experts=hf.get("moe_num_experts", 8),
            top_k=hf.get("moe_topk", 2),
            d_ff=d_ff,  # always silu; only the shared expert uses `hidden_act`
            router=nn.RouterConfig(normalize=True),
            shared=llama_like.gated_mlp(hf, d_ff=n_shared * d_ff, bias=hf.get("mlp_bias", False)),
        ),
    )
    return llama_like.decoder(hf, block, norm)


EXPERTS = mixtures.FEED_FORWARD + "experts."

HUGGING_FACE = (
    Family(
        model_type="aria_text",
        architecture="AriaTextForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "mlp_bias": "block.feed_forward.shared.bias",
            "hidden_act": llama_like.written_activation("block.feed_forward.shared.activation"),
            "moe_num_experts": "block.feed_forward.n_experts",
            "moe_topk": "block.feed_forward.top_k",
            "moe_num_shared_experts": mixtures.n_shared_experts,
        },
        rules=instead(
            same(mixtures.FEED_FORWARD + "router.proj", mixtures.MLP + "router"),
            then_transposed(
                joined(
                    (EXPERTS + "gate_proj", EXPERTS + "up_proj"),
                    mixtures.MLP + "experts.fc1",
                    dim=1,
                )
            ),
            transposed(EXPERTS + "down_proj", mixtures.MLP + "experts.fc2"),
            *mixtures.SHARED_RULES,
            base=llama_like.RULES,
        ),
    ),
)
