"""GLM-4 (2406.12793), GLM-4-0414 and GLM-4.5 (2508.06471)."""

from collections.abc import Callable

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Family, differs
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, joined, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a GLM-4 config: LLaMA with RoPE on half of each head, on pairs of adjacent features."""
    return _read_dense(hf, nn.PreNormConfig)


def read_glm4(hf: Fields) -> nn.DecoderConfig:
    """Read a GLM-4-0414 config: GLM-4 with norms on both sides of every sub-layer."""
    return _read_dense(hf, nn.SandwichNormConfig)


def _read_dense(
    hf: Fields, wiring: Callable[..., nn.PreNormConfig | nn.SandwichNormConfig]
) -> nn.DecoderConfig:
    norm = llama_like.rms_norm(hf, eps=1.5625e-7)
    block = wiring(
        norm=norm,
        attention=llama_like.attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 2),
            head_dim=hf.get("head_dim", 128),
            position=read_rope(hf, fraction=0.5, pairing="interleaved"),
            qkv_bias=hf.get("attention_bias", True),
        ),
        feed_forward=llama_like.gated_mlp(hf),
    )
    return llama_like.decoder(hf, block, norm)


def read_mixture(hf: Fields) -> nn.DecoderConfig:
    """Read a GLM-4.5 config: DeepSeek-V3's mixture, grouped queries, RoPE on half of each head."""
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers")  # heads used only in training
    norm = llama_like.rms_norm(hf, eps=1e-5)
    mixture = mixtures.sigmoid_mixture(hf, n_experts=128, top_k=8, d_ff=1408)
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 10944))
    mixed_attention = llama_like.attention(
        hf,
        n_kv_heads=hf.get("num_key_value_heads", 8),
        position=read_rope(hf, fraction=0.5),
        qk_norm=nn.QKNormConfig(norm=norm) if hf.get("use_qk_norm", False) else None,
        qkv_bias=hf.get("attention_bias", False),
    )
    kinds = mixtures.dense_first(hf, hf.get("first_k_dense_replace", 1))
    layers = [
        nn.PreNormConfig(
            norm=norm,
            attention=mixed_attention,
            feed_forward=mixture if kind == mixtures.SPARSE else dense,
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


GLM_KEYS = llama_like.KEYS | {
    "partial_rotary_factor": "block.attention.position.fraction",
    "attention_bias": "block.attention.qkv_bias",
}
GLM_RULES = instead(
    joined(
        ("layers.{i}.feed_forward.gate_proj", "layers.{i}.feed_forward.up_proj"),
        "model.layers.{i}.mlp.gate_up_proj",
    ),
    base=llama_like.RULES,
)

HUGGING_FACE = (
    Family(
        model_type="glm",
        architecture="GlmForCausalLM",
        read=read,
        keys=GLM_KEYS,
        rules=GLM_RULES,
    ),
    Family(
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        read=read_glm4,
        keys=GLM_KEYS,
        rules=instead(
            same("layers.{i}.attention_output_norm", "model.layers.{i}.post_self_attn_layernorm"),
            same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_mlp_layernorm"),
            base=GLM_RULES,
        ),
    ),
    Family(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        read=read_mixture,
        keys=GLM_KEYS
        | mixtures.MIXTURE_KEYS
        | mixtures.ROUTER_KEYS
        | {
            "first_k_dense_replace": mixtures.written_n_dense,
            "use_qk_norm": differs("block.attention.qk_norm", None),
        },
        rules=(*llama_like.RULES, *mixtures.MIXTURE_RULES),
        # Layers 46 and 92 of the published files are for multi-token prediction.
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.(46|92)\..*"),
    ),
)
