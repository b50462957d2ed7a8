"""Hunyuan (Tencent, 2025; predecessor: 2411.02265), dense and with mixtures of experts, and Hy3."""

from workhorse import nn
from workhorse.config.base import ConfigError
from workhorse.models.huggingface import llama_like, mixtures
from workhorse.models.huggingface.family import Data, Family, FieldPath
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import instead, same
from workhorse.models.huggingface.rotation import read_rope, rope_section

FIXED: dict[str, object] = {
    "group_limited_greedy": False,
    "mlp_bias": False,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "position_embedding_xdrope": False,
    "routed_scaling_factor": 1.0,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
"""Keys of published files that transformers does not read, with the only values supported."""
IDLE = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num"),
    *("dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "org_vocab_size", "pad_id"),
    *("pool_type", "skip_cls_token", "text_end_id", "text_start_id"),
)
"""Keys of published files that do not affect the computation."""


def read(hf: Fields) -> nn.DecoderConfig:
    """Read a dense Hunyuan config: LLaMA with norms on queries and keys after RoPE."""
    norm = _check(hf)
    block = nn.PreNormConfig(norm=norm, attention=_heads(hf), feed_forward=llama_like.gated_mlp(hf))
    return llama_like.decoder(hf, block, norm)


def read_mixture(hf: Fields) -> nn.DecoderConfig:
    """Read a Hunyuan config with a mixture of experts in every layer.

    The layers are otherwise those of `read`. The shared expert is as wide as each routed expert.
    """
    norm = _check(hf)
    width = hf.need("intermediate_size", int)
    for key, value in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
        per_layer = isinstance(hf.values.get(key), list)
        allowed = [value] * hf.need("num_hidden_layers", int) if per_layer else value
        hf.refuse(
            key,
            allowed,
            "transformers has one shared expert, and all experts have width intermediate_size",
        )
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", 1),
        top_k=1,
        d_ff=width,
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(normalize=True),
        shared=llama_like.gated_mlp(hf),
    )
    plain = nn.PreNormConfig(norm=norm, attention=_heads(hf), feed_forward=mixture)
    chosen = _chosen(hf)
    layers = [plain.replace(feed_forward=mixture.replace(top_k=top_k)) for top_k in chosen]
    return llama_like.decoder(hf, layers, norm, names=[f"top{top_k}" for top_k in chosen])


def read_hy3(hf: Fields) -> nn.DecoderConfig:
    """Read an Hy3 config (2026): norms before RoPE, DeepSeek-V3's mixture without groups."""
    hf.ignore("enable_moe_fp32_combine")  # precision in which the shared expert is added
    hf.refuse("first_k_dense_replace", 1, "transformers reads mlp_layer_types only")
    norm = llama_like.rms_norm(hf, eps=1e-5)
    bias, mlp_bias = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    width = hf.get("moe_intermediate_size", 1536)
    mixture = nn.MoEConfig(
        n_experts=hf.get("num_experts", 192),
        top_k=hf.get("num_experts_per_tok", 8),
        d_ff=width,
        activation=llama_like.activation(hf),
        router=nn.RouterConfig(
            score="sigmoid",
            normalize=True,
            scale=hf.get("router_scaling_factor", 2.826),
            selection_bias=True,
        ),
        shared=llama_like.gated_mlp(
            hf, d_ff=width * hf.get("num_shared_experts", 1), bias=mlp_bias
        ),
    )
    dense = llama_like.gated_mlp(hf, d_ff=hf.get("intermediate_size", 13312), bias=mlp_bias)
    heads = llama_like.attention(
        hf,
        n_kv_heads=hf.get("num_key_value_heads", 8),
        head_dim=hf.get("head_dim", 128),
        position=read_rope(hf, theta=11_158_840.0),
        qk_norm=nn.QKNormConfig(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    kinds = mixtures.mlp_layer_types(hf, mixtures.dense_first(hf, 1))
    layers = [
        nn.PreNormConfig(
            norm=norm, attention=heads, feed_forward=mixture if kind == mixtures.SPARSE else dense
        )
        for kind in kinds
    ]
    return llama_like.decoder(hf, layers, norm, names=kinds)


def _check(hf: Fields) -> nn.RMSNormConfig:
    """Raise an error for unsupported options, and read the norm of a config."""
    hf.ignore(*IDLE)
    for key, value in FIXED.items():
        hf.refuse(key, value, "transformers does not implement this for Hunyuan")
    return llama_like.rms_norm(hf, eps=1e-5)


def _heads(hf: Fields) -> nn.AttentionConfig:
    bias = hf.get("attention_bias", False)
    return llama_like.attention(
        hf,
        position=_rotation(hf),
        qk_norm=nn.QKNormConfig(norm=llama_like.rms_norm(hf, eps=1e-5), after_rope=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def _rotation(hf: Fields) -> nn.RopeConfig:
    """Read the RoPE settings; "dynamic" with `alpha` means theta · alpha^(d / (d - 2))."""
    given = rope_section(hf) or Fields({})
    kind = given.get("rope_type", given.get("type", "default"))
    alpha = given.optional("alpha", float) if kind == "dynamic" else None
    if not alpha:
        return read_rope(hf)
    given.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    rope = read_rope(hf, scaled=False)
    width = hf.need("hidden_size", int) // hf.need("num_attention_heads", int)
    head_dim = hf.get("head_dim", width)
    try:
        return rope.replace(theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))
    except ArithmeticError:
        raise ConfigError(
            f"{given.where}: alpha={alpha} gives no finite theta for head_dim={head_dim}; "
            "correct the file"
        ) from None


def _chosen(hf: Fields) -> list[int]:
    """Read the number of chosen experts in each layer. The key has one value, or one per layer."""
    depth = hf.need("num_hidden_layers", int)
    if not isinstance(hf.values.get("moe_topk"), list):
        return [hf.get("moe_topk", 1)] * depth
    chosen = hf.sequence("moe_topk", int) or []
    if len(chosen) != depth:
        raise ConfigError(
            f"{hf.where}: moe_topk has length {len(chosen)} for {depth} layers; "
            "give one value per layer"
        )
    return chosen


def written_chosen(data: Data) -> int | list[int]:
    """Return `moe_topk` for `config.json`: one value if all layers share it, else a list."""
    chosen: list[int] = [layer["feed_forward"]["top_k"] for layer in data["layers"]]
    return chosen if len(set(chosen)) > 1 else chosen[0]


HUNYUAN_KEYS: dict[str, FieldPath] = llama_like.KEYS | {
    "attention_bias": "block.attention.qkv_bias"
}
HUNYUAN_RULES = instead(
    same("layers.{i}.attention.q_norm", "model.layers.{i}.self_attn.query_layernorm"),
    same("layers.{i}.attention.k_norm", "model.layers.{i}.self_attn.key_layernorm"),
    base=llama_like.RULES,
)
FEED_FORWARD, MLP = "layers.{i}.feed_forward.", "model.layers.{i}.mlp."
SHARED_RULES = tuple(
    same(f"{FEED_FORWARD}shared.{name}_proj", f"{MLP}shared_mlp.{name}_proj")
    for name in ("gate", "up", "down")
)

HUGGING_FACE = (
    Family(
        model_type="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        read=read,
        keys=HUNYUAN_KEYS,
        rules=HUNYUAN_RULES,
    ),
    Family(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        read=read_mixture,
        keys=HUNYUAN_KEYS
        | {"num_experts": "block.feed_forward.n_experts", "moe_topk": written_chosen},
        rules=instead(
            same(FEED_FORWARD + "router.proj", MLP + "gate.wg"),
            *mixtures.EXPERT_RULES,
            *SHARED_RULES,
            base=HUNYUAN_RULES,
        ),
    ),
    Family(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        read=read_hy3,
        keys={
            **HUNYUAN_KEYS,
            "intermediate_size": mixtures.of_dense("d_ff"),
            "moe_intermediate_size": mixtures.of_sparse("d_ff"),
            "mlp_bias": mixtures.of_sparse("shared.bias"),
            "mlp_layer_types": mixtures.written_mlp_layer_types,
            "num_experts": mixtures.of_sparse("n_experts"),
            "num_experts_per_tok": mixtures.of_sparse("top_k"),
            "num_shared_experts": mixtures.n_shared_experts,
            "router_scaling_factor": mixtures.of_sparse("router.scale"),
        },
        rules=instead(
            same(FEED_FORWARD + "router.proj", MLP + "router.gate"),
            same(FEED_FORWARD + "router.selection_bias", MLP + "expert_bias"),
            *mixtures.EXPERT_RULES,
            *SHARED_RULES,
            base=llama_like.RULES,
        ),
        # Layer 80 of the published files is for multi-token prediction.
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.80\..*"),
    ),
)
