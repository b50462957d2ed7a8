"""GLM-4.7-Flash (Z.ai, 2026), a small relative of GLM-4.5 (2508.06471)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GLM-4.7-Flash config: DeepSeek-V3's attention and mixture; only layer 0 is dense."""
    hf.ignore("num_nextn_predict_layers")  # heads used only in training
    hf.refuse("first_k_dense_replace", 1, "transformers reads mlp_layer_types only")
    hf.refuse("topk_method", "noaux_tc", "GLM-4.7-Flash chooses experts by score plus bias")
    for size in ("qk_nope_head_dim", "v_head_dim"):
        hf.need(size, int)  # required, because the defaults differ from DeepSeek's
    norm = llama_like.rms_norm(hf, eps=1e-5)
    neighbours = hf.get("rope_interleave", True)
    heads = llama_like.latent_attention(hf, neighbours=neighbours).replace(
        q_rank=hf.optional("q_lora_rank", int, 768)
    )
    mixture = mixtures.sigmoid_mixture(hf, n_experts=64, top_k=4, d_ff=1536, scale=1.8)
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 10240))
    kinds = mixtures.mlp_layer_types(hf, mixtures.dense_first(hf, 1))
    layers = [
        nn.PreNormConfig(
            norm=norm, attention=heads, feed_forward=mixture if kind == mixtures.SPARSE else dense
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


PLACES = (
    llama_like.KEYS
    | llama_like.LATENT_KEYS
    | llama_like.PAIRING_KEYS
    | mixtures.MIXTURE_KEYS
    | mixtures.ROUTER_KEYS
)

HUGGING_FACE = (
    Family(
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        read=read,
        keys={key: path for key, path in PLACES.items() if key != "first_k_dense_replace"}
        | {"mlp_layer_types": mixtures.written_mlp_layer_types},
        rules=instead(*llama_like.LATENT_RULES, *mixtures.MIXTURE_RULES, base=llama_like.RULES),
        # Layer 47 of the published files is for multi-token prediction.
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.47\..*"),
    ),
)
