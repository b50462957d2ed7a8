"""K-EXAONE Technical Report (LG AI Research, 2601.01739)."""

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a K-EXAONE config: EXAONE 4's attention in pre-norm blocks, DeepSeek-V3's mixture."""
    hf.ignore("num_nextn_predict_layers")  # heads used only in training
    norm, rope = llama_like.rms_norm(hf, eps=1e-5), read_rope(hf)
    window = hf.get("sliding_window", 4096)
    mixture = mixtures.sigmoid_mixture(
        hf,
        n_experts=64,
        top_k=8,
        d_ff=1024,
        scale=2.5,
        count="num_experts",
        shared="num_shared_experts",
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 16384))

    def block(kind: str, feed_forward: nn.FeedForwardConfig) -> nn.PreNormConfig:
        local = kind == llama_like.SLIDING
        return nn.PreNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 32),
                position=rope if local else nn.NoPositionConfig(),
                window=window if local else None,
                qk_norm=nn.QKNormConfig(norm=norm),
            ),
            feed_forward=feed_forward,
        )

    types = llama_like.layer_types(hf, _types(hf))
    kinds = mixtures.mlp_layer_types(
        hf, mixtures.dense_first(hf, hf.get("first_k_dense_replace", 1))
    )
    pairs = list(zip(types, kinds, strict=True))
    return llama_like.decoder(
        hf,
        [block(of, mixture if kind == mixtures.SPARSE else dense) for of, kind in pairs],
        norm,
        names=[f"{llama_like.SHORT_NAMES[of]}_{kind}" for of, kind in pairs],
    )


def _types(hf: Fields) -> list[str]:
    """Return the layer types of a file without `layer_types`, from its window pattern."""
    hf.ignore("sliding_window_pattern")
    if hf.values.get("layer_types") is not None:
        return [llama_like.FULL] * hf.need("num_hidden_layers", int)
    return [
        llama_like.FULL if last else llama_like.SLIDING
        for last in llama_like.every(hf, "sliding_window_pattern", 4)
    ]


HUGGING_FACE = (
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        read=read,
        keys={
            **llama_like.KEYS,
            **mixtures.ROUTER_KEYS,
            "intermediate_size": mixtures.of_dense("d_ff"),
            "moe_intermediate_size": mixtures.of_sparse("d_ff"),
            "num_experts": mixtures.of_sparse("n_experts"),
            "num_experts_per_tok": mixtures.of_sparse("top_k"),
            "num_shared_experts": mixtures.n_shared_experts,
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "mlp_layer_types": mixtures.written_mlp_layer_types,
        },
        rules=instead(
            same(
                "layers.{i}.feed_forward.router.selection_bias",
                "model.layers.{i}.mlp.e_score_correction_bias",
            ),
            base=(*mixtures.MIXTURE_RULES, *llama_like.RULES),
        ),
        ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
    ),
)
