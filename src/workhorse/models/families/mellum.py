"""Mellum 2 (JetBrains, 2026)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SHORT_NAMES,
    SLIDING,
    activation,
    alternating,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_rope_by_type,
    written_window,
)
from workhorse.models.huggingface.mixtures import (
    MIXTURE_RULES,
    SPARSE,
    mlp_layer_types,
    of_dense,
    of_sparse,
    written_mlp_layer_types,
)
from workhorse.models.huggingface.moves import instead
from workhorse.models.huggingface.rotation import ROPE_KEYS, read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import FeedForwardConfig, PreNormConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig

THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}


def read(hf: Fields) -> DecoderConfig:
    """Read a Mellum 2 config: Qwen3's mixture of experts.

    Layers with and without a window have different RoPE settings.
    """
    hf.ignore("mtp_layer_types", "mtp_mlp_layer_types")  # heads used only in training
    hf.ignore("num_mtp_layers", "num_nextn_predict_layers")
    norm = rms_norm(hf)
    bias = hf.get("attention_bias", False)
    window = hf.optional("sliding_window", int, 1024)
    mixture = MoEConfig(
        n_experts=hf.get("num_experts", hf.get("num_local_experts", 64)),
        top_k=hf.get("num_experts_per_tok", 8),
        d_ff=hf.get("moe_intermediate_size", 896),
        activation=activation(hf),
        router=RouterConfig(normalize=hf.get("norm_topk_prob", True)),
    )
    dense = gated_mlp(hf, d_ff=hf.get("intermediate_size", 7168))

    def block(kind: str, feed_forward: FeedForwardConfig) -> PreNormConfig:
        return PreNormConfig(
            norm=norm,
            attention=attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=read_rope(hf, theta=THETAS[kind], theta_key=None, layer_type=kind),
                window=window if kind == SLIDING else None,
                qk_norm=QKNormConfig(norm=norm),
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=feed_forward,
        )

    types = layer_types(hf, alternating(hf, [FULL]))
    kinds = mlp_layer_types(hf, alternating(hf, [SPARSE]))
    pairs = list(zip(types, kinds, strict=True))
    return decoder(
        hf,
        [block(of, mixture if kind == SPARSE else dense) for of, kind in pairs],
        norm,
        names=[f"{SHORT_NAMES[of]}_{kind}" for of, kind in pairs],
    )


HUGGING_FACE = (
    Family(
        model_type="mellum",
        architecture="MellumForCausalLM",
        read=read,
        keys={key: path for key, path in KEYS.items() if key not in ROPE_KEYS}
        | {
            "rope_parameters": written_rope_by_type,
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": written_window,
            "layer_types": written_layer_types,
            "mlp_layer_types": written_mlp_layer_types,
            "intermediate_size": of_dense("d_ff"),
            "moe_intermediate_size": of_sparse("d_ff"),
            "num_experts": of_sparse("n_experts"),
            "num_experts_per_tok": of_sparse("top_k"),
            "norm_topk_prob": of_sparse("router.normalize"),
        },
        rules=instead(*MIXTURE_RULES, base=RULES),
        ignored=(r".*\.rotary_emb\..*inv_freq", r"mtp\..*"),
    ),
)
