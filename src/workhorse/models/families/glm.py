"""GLM-4 (2406.12793), GLM-4-0414 and GLM-4.5 (2508.06471)."""

from collections.abc import Callable

from workhorse.models.huggingface.family import Family, differs
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    KEYS,
    RULES,
    attention,
    decoder,
    gated_mlp,
    rms_norm,
)
from workhorse.models.huggingface.mixtures import (
    MIXTURE_KEYS,
    MIXTURE_RULES,
    ROUTER_KEYS,
    SPARSE,
    dense_first,
    sigmoid_mixture,
    written_n_dense,
)
from workhorse.models.huggingface.moves import instead, joined, same
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import PreNormConfig, SandwichNormConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a GLM-4 config: LLaMA with RoPE on half of each head, on pairs of adjacent features."""
    return _read_dense(hf, PreNormConfig)


def read_glm4(hf: Fields) -> DecoderConfig:
    """Read a GLM-4-0414 config: GLM-4 with norms on both sides of every sub-layer."""
    return _read_dense(hf, SandwichNormConfig)


def _read_dense(
    hf: Fields, wiring: Callable[..., PreNormConfig | SandwichNormConfig]
) -> DecoderConfig:
    norm = rms_norm(hf, eps=1.5625e-7)
    block = wiring(
        norm=norm,
        attention=attention(
            hf,
            n_kv_heads=hf.get("num_key_value_heads", 2),
            head_dim=hf.get("head_dim", 128),
            position=read_rope(hf, fraction=0.5, pairing="interleaved"),
            qkv_bias=hf.get("attention_bias", True),
        ),
        feed_forward=gated_mlp(hf),
    )
    return decoder(hf, block, norm)


def read_mixture(hf: Fields) -> DecoderConfig:
    """Read a GLM-4.5 config: DeepSeek-V3's mixture, grouped queries, RoPE on half of each head."""
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers")  # heads used only in training
    norm = rms_norm(hf, eps=1e-5)
    mixture = sigmoid_mixture(hf, n_experts=128, top_k=8, d_ff=1408)
    dense = gated_mlp(hf, d_ff=hf.get("intermediate_size", 10944))
    mixed_attention = attention(
        hf,
        n_kv_heads=hf.get("num_key_value_heads", 8),
        position=read_rope(hf, fraction=0.5),
        qk_norm=QKNormConfig(norm=norm) if hf.get("use_qk_norm", False) else None,
        qkv_bias=hf.get("attention_bias", False),
    )
    kinds = dense_first(hf, hf.get("first_k_dense_replace", 1))
    layers = [
        PreNormConfig(
            norm=norm,
            attention=mixed_attention,
            feed_forward=mixture if kind == SPARSE else dense,
        )
        for kind in kinds
    ]
    return decoder(hf, layers, norm, names=kinds)


GLM_KEYS = KEYS | {
    "partial_rotary_factor": "block.attention.position.fraction",
    "attention_bias": "block.attention.qkv_bias",
}
GLM_RULES = instead(
    joined(
        ("layers.{i}.feed_forward.gate_proj", "layers.{i}.feed_forward.up_proj"),
        "model.layers.{i}.mlp.gate_up_proj",
    ),
    base=RULES,
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
        | MIXTURE_KEYS
        | ROUTER_KEYS
        | {
            "first_k_dense_replace": written_n_dense,
            "use_qk_norm": differs("block.attention.qk_norm", None),
        },
        rules=(*RULES, *MIXTURE_RULES),
        # Layers 46 and 92 of the published files are for multi-token prediction.
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.(46|92)\..*"),
    ),
)
