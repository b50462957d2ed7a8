"""Mellum 2 (JetBrains, 2026)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope

THETAS = {llama_like.FULL: 500_000.0, llama_like.SLIDING: 10_000.0}


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a Mellum 2 config: Qwen3's mixture of experts.

    Layers with and without a window have different RoPE settings.
    """
    hf.ignore("mtp_layer_types", "mtp_mlp_layer_types")  # heads used only in training
    hf.ignore("num_mtp_layers", "num_nextn_predict_layers")
    norm = llama_like.rms_norm(hf)
    bias = hf.get("attention_bias", False)
    window = hf.optional("sliding_window", int, 1024)
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", hf.get("num_local_experts", 64)),
        top_k=hf.get("num_experts_per_tok", 8),
        d_ff=hf.get("moe_intermediate_size", 896),
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(normalize=hf.get("norm_topk_prob", True)),
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 7168))

    def block(kind: str, feed_forward: nn.FeedForwardConfig) -> nn.PreNormConfig:
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=read_rope(hf, theta=THETAS[kind], theta_key=None, layer_type=kind),
                window=window if kind == llama_like.SLIDING else None,
                qk_norm=nn.QKNormConfig(norm=norm),
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=feed_forward,
        )

    types = llama_like.layer_types(hf, llama_like.alternating(hf, [llama_like.FULL]))
    kinds = mixtures.mlp_layer_types(hf, llama_like.alternating(hf, [mixtures.SPARSE]))
    pairs = list(zip(types, kinds, strict=True))
    return llama_like.decoder(
        hf,
        [block(of, mixture if kind == mixtures.SPARSE else dense) for of, kind in pairs],
        norm,
        names=[f"{llama_like.SHORT_NAMES[of]}_{kind}" for of, kind in pairs],
    )


HUGGING_FACE = (
    Family(
        model_type="mellum",
        architecture="MellumForCausalLM",
        read=read,
        keys={key: path for key, path in llama_like.KEYS.items() if key not in ROPE_KEYS}
        | {
            "rope_parameters": llama_like.written_rope_by_type,
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "mlp_layer_types": mixtures.written_mlp_layer_types,
            "intermediate_size": mixtures.of_dense("d_ff"),
            "moe_intermediate_size": mixtures.of_sparse("d_ff"),
            "num_experts": mixtures.of_sparse("n_experts"),
            "num_experts_per_tok": mixtures.of_sparse("top_k"),
            "norm_topk_prob": mixtures.of_sparse("router.normalize"),
        },
        rules=instead(*mixtures.MIXTURE_RULES, base=llama_like.RULES),
        ignored=(r".*\.rotary_emb\..*inv_freq", r"mtp\..*"),
    ),
)
