"""Flint (RecursiveSI, 2026): Qwen3's mixture, windows, attention sinks and a shared expert."""

from workhorse.models.families.qwen import MIXTURE_KEYS
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.llama_like import (
    FULL,
    KEYS,
    RULES,
    SHORT_NAMES,
    SLIDING,
    activation,
    attention,
    decoder,
    every,
    gated_mlp,
    layer_types,
    rms_norm,
    written_layer_types,
    written_window,
)
from workhorse.models.huggingface.mixtures import EXPERT_RULES, of_sparse
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig
from workhorse.nn.positions.absolute import NoPositionConfig


def read(hf: Fields) -> DecoderConfig:
    """Read a Flint config: RoPE only in layers with a window, a learned attention sink per head."""
    norm, rope, bias = rms_norm(hf, multiply="before_cast"), read_rope(hf), _bias(hf)
    window = hf.get("sliding_window", 513)
    types = layer_types(hf, _types(hf.need("num_hidden_layers", int)))
    mixture = MoEConfig(
        n_experts=hf.get("num_experts", 256),
        top_k=hf.get("num_experts_per_tok", 6),
        d_ff=hf.get("moe_intermediate_size", 512),
        activation=activation(hf),
        router=RouterConfig(score="sigmoid", normalize=hf.get("norm_topk_prob", True)),
        shared=gated_mlp(hf, d_ff=hf.get("shared_expert_intermediate_size", 1024)),
    )
    dense = gated_mlp(hf, d_ff=hf.get("intermediate_size", 6144))

    def block(kind: str, sparse: bool) -> PreNormConfig:
        return PreNormConfig(
            norm=norm,
            attention=attention(
                hf,
                n_kv_heads=hf.get("num_key_value_heads", 4),
                head_dim=hf.get("head_dim", 128),
                position=rope if kind == SLIDING else NoPositionConfig(),
                window=window if kind == SLIDING else None,
                qk_norm=QKNormConfig(norm=norm),
                sinks=True,
                qkv_bias=bias,
                out_bias=bias,
            ),
            feed_forward=mixture if sparse else dense,
        )

    kinds = list(zip(types, _sparse(hf), strict=True))
    names = [SHORT_NAMES[kind] + ("" if sparse else "_dense") for kind, sparse in kinds]
    return decoder(hf, [block(*kind) for kind in kinds], norm, names=names)


def _bias(hf: Fields) -> bool:
    return hf.get("attention_bias", False)


def _types(depth: int) -> list[str]:
    """Return default layer types: full in the first two, in every fourth and in the last layer."""
    return [FULL if n in (0, 1, depth - 1) or n % 4 == 1 else SLIDING for n in range(depth)]


def _sparse(hf: Fields) -> list[bool]:
    """Read for each layer whether it has a mixture of experts."""
    given = hf.sequence("mlp_only_layers", int)
    dense = {0, 1} if given is None else set(given)
    return [last and n not in dense for n, last in enumerate(every(hf, "decoder_sparse_step", 1))]


FEED_FORWARD, MLP = "layers.{i}.feed_forward.", "model.layers.{i}.mlp."

HUGGING_FACE = (
    Family(
        model_type="flint",
        architecture="FlintForCausalLM",
        read=read,
        keys=KEYS
        | MIXTURE_KEYS
        | {
            "attention_bias": "block.attention.qkv_bias",
            "sliding_window": written_window,
            "layer_types": written_layer_types,
            "shared_expert_intermediate_size": of_sparse("shared.d_ff"),
        },
        rules=instead(
            same("layers.{i}.attention.kernel.sinks", "model.layers.{i}.self_attn.softmax_offset"),
            same(FEED_FORWARD + "router.proj", MLP + "gate"),
            *EXPERT_RULES,
            *(
                same(f"{FEED_FORWARD}shared.{proj}", f"{MLP}shared_expert.{proj}")
                for proj in ("gate_proj", "up_proj", "down_proj")
            ),
            base=RULES,
        ),
    ),
)
