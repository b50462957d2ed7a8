"""Arcee Trinity (AFMoE, 2025)."""

import math

from workhorse import nn
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope


def read(hf: Fields) -> nn.DecoderConfig:
    """Read an AFMoE config: norms around each sub-layer, gated attention, mixtures of experts.

    Only local layers (with a window) use RoPE.
    """
    hf.refuse("score_func", "sigmoid", "transformers implements only sigmoid scores for AFMoE")
    hf.refuse("route_norm", True, "transformers always divides the weights by their sum")
    hf.refuse("n_group", 1, "transformers always chooses among all experts")
    hf.ignore("topk_group", "load_balance_coeff", "use_grouped_mm")
    norm = llama_like.rms_norm(hf, eps=1e-5, multiply="before_cast")
    bias = hf.get("attention_bias", False)
    width = hf.get("moe_intermediate_size", 1408)
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", 64),
        top_k=hf.get("num_experts_per_tok", 6),
        d_ff=width,
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(
            score="sigmoid",
            normalize=True,
            scale=hf.get("route_scale", 1.0),
            selection_bias=True,
        ),
        shared=llama_like.gated_mlp(hf, d_ff=width * hf.get("num_shared_experts", 2)),
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 6144))
    window = hf.optional("sliding_window", int, 1024)
    n_local = hf.get("global_attn_every_n_layers", 4) - 1
    types = llama_like.layer_types(
        hf, llama_like.alternating(hf, (llama_like.SLIDING,) * n_local + (llama_like.FULL,))
    )
    kinds = mixtures.dense_first(hf, hf.get("num_dense_layers", 1))

    def block(kind: str, layer_type: str) -> nn.SandwichNormConfig:
        local = layer_type == llama_like.SLIDING
        return nn.SandwichNormConfig(
            norm=norm,
            attention=llama_like.attention(
                hf,
                head_dim=hf.get("head_dim", 128),
                position=read_rope(hf) if local else nn.NoPositionConfig(),
                qk_norm=nn.QKNormConfig(norm=norm),
                window=window if local else None,
                output_gate=True,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if kind == mixtures.SPARSE else dense,
        )

    scale = math.sqrt(hf.need("hidden_size", int)) if hf.get("mup_enabled", False) else 1.0
    return llama_like.decoder(
        hf,
        [block(*both) for both in zip(kinds, types, strict=True)],
        norm,
        names=[
            f"{kind}_{llama_like.SHORT_NAMES[of]}" for kind, of in zip(kinds, types, strict=True)
        ],
        embedding=nn.EmbeddingConfig(multiplier=scale),
    )


def mup_enabled(data: Data) -> bool:
    """Return `mup_enabled` for `config.json`: True if the embedding is scaled."""
    return data["embedding"]["multiplier"] != 1.0


HUGGING_FACE = (
    Family(
        model_type="afmoe",
        architecture="AfmoeForCausalLM",
        read=read,
        keys=llama_like.KEYS
        | {
            "intermediate_size": mixtures.MIXTURE_KEYS["intermediate_size"],
            "moe_intermediate_size": mixtures.MIXTURE_KEYS["moe_intermediate_size"],
            "num_experts_per_tok": mixtures.MIXTURE_KEYS["num_experts_per_tok"],
            "num_experts": mixtures.of_sparse("n_experts"),
            "num_shared_experts": mixtures.n_shared_experts,
            "num_dense_layers": mixtures.written_n_dense,
            "route_scale": mixtures.of_sparse("router.scale"),
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": llama_like.written_window,
            "layer_types": llama_like.written_layer_types,
            "mup_enabled": mup_enabled,
        },
        rules=instead(
            same("layers.{i}.attention.gate.proj", "model.layers.{i}.self_attn.gate_proj"),
            same("layers.{i}.attention_output_norm", "model.layers.{i}.post_attention_layernorm"),
            same("layers.{i}.feed_forward_norm", "model.layers.{i}.pre_mlp_layernorm"),
            same("layers.{i}.feed_forward_output_norm", "model.layers.{i}.post_mlp_layernorm"),
            same("layers.{i}.feed_forward.router.proj", "model.layers.{i}.mlp.router.gate"),
            same(
                "layers.{i}.feed_forward.router.selection_bias", "model.layers.{i}.mlp.expert_bias"
            ),
            *mixtures.EXPERT_RULES,
            *mixtures.SHARED_RULES,
            base=llama_like.RULES,
        ),
    ),
)
