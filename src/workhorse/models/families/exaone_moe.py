"""K-EXAONE Technical Report (LG AI Research, 2601.01739)."""

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SHORT_NAMES,
    SLIDING,
    attention,
    decoder,
    every,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_window,
)
from workhorse.models.huggingface.mixtures import (
    MIXTURE_RULES,
    ROUTER_KEYS,
    SPARSE,
    dense_first,
    mlp_layer_types,
    n_shared_experts,
    of_dense,
    of_sparse,
    sigmoid_mixture,
    written_mlp_layer_types,
)
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import FeedForwardConfig, PreNormConfig
from workhorse.nn.positions.absolute import NoPositionConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a K-EXAONE config: EXAONE 4's attention in pre-norm blocks, DeepSeek-V3's mixture."""
    hf.ignore("num_nextn_predict_layers")  # heads used only in training
    norm, rope = rms_norm(hf, eps=1e-5), read_rope(hf)
    window = hf.get("sliding_window", 4096)
    mixture = sigmoid_mixture(
        hf,
        n_experts=64,
        top_k=8,
        d_ff=1024,
        scale=2.5,
        count="num_experts",
        shared="num_shared_experts",
    )
    dense = gated_mlp(hf, d_ff=hf.get("intermediate_size", 16384))

    def block(kind: str, feed_forward: FeedForwardConfig) -> PreNormConfig:
        local = kind == SLIDING
        return PreNormConfig(
            norm=norm,
            attention=attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 32),
                position=rope if local else NoPositionConfig(),
                window=window if local else None,
                qk_norm=QKNormConfig(norm=norm),
            ),
            feed_forward=feed_forward,
        )

    types = layer_types(hf, _types(hf))
    kinds = mlp_layer_types(hf, dense_first(hf, hf.get("first_k_dense_replace", 1)))
    pairs = list(zip(types, kinds, strict=True))
    return decoder(
        hf,
        [block(of, mixture if kind == SPARSE else dense) for of, kind in pairs],
        norm,
        names=[f"{SHORT_NAMES[of]}_{kind}" for of, kind in pairs],
    )


def _types(hf: Fields) -> list[str]:
    """Return the layer types of a file without `layer_types`, from its window pattern."""
    hf.ignore("sliding_window_pattern")
    if hf.values.get("layer_types") is not None:
        return [FULL] * hf.need("num_hidden_layers", int)
    return [FULL if last else SLIDING for last in every(hf, "sliding_window_pattern", 4)]


HUGGING_FACE = (
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        read=read,
        keys={
            **KEYS,
            **ROUTER_KEYS,
            "intermediate_size": of_dense("d_ff"),
            "moe_intermediate_size": of_sparse("d_ff"),
            "num_experts": of_sparse("n_experts"),
            "num_experts_per_tok": of_sparse("top_k"),
            "num_shared_experts": n_shared_experts,
            "sliding_window": written_window,
            "layer_types": written_layer_types,
            "mlp_layer_types": written_mlp_layer_types,
        },
        rules=instead(
            same(
                "layers.{i}.feed_forward.router.selection_bias",
                "model.layers.{i}.mlp.e_score_correction_bias",
            ),
            base=(*MIXTURE_RULES, *RULES),
        ),
        ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
    ),
)
