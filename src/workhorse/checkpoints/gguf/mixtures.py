"""llama.cpp's mixture-of-experts architectures. Mixtral is part of the architecture `llama`."""

import math

from workhorse.checkpoints.gguf.architecture import (
    ATTENTION_BIASES,
    BIASED,
    FRACTION,
    FULL_NORM,
    GRANITE,
    GRANITE_KEYS,
    HEAD_NORM,
    LLAMA,
    RMS,
    ROTARY,
    SWIGLU,
    TIE,
    WINDOW,
    Architecture,
    Data,
    divided_logits,
    equal_heads,
    some_window,
)
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import RouterConfig
from workhorse.nn.feedforward import ClampedSwigluConfig
from workhorse.nn.positions.rope import RopeConfig, YarnScalingConfig

UNNORMALISED = MoEConfig(d_ff=1, n_experts=1, top_k=1)
MIXTURE = UNNORMALISED.replace(router=RouterConfig(normalize=True))
"""A mixture in which the expert weights are a softmax over the chosen experts."""
SHARED = MIXTURE.replace(shared=SWIGLU)

NORMED = ROTARY.replace(qk_norm=HEAD_NORM)
SINKS = BIASED.replace(sinks=True)
GPT_OSS = MIXTURE.replace(
    bias=True, clamped=ClampedSwigluConfig(), router=RouterConfig(normalize=True, bias=True)
)
EXPERT_WIDTH = {"expert_feed_forward_length": "mixture.feed_forward.d_ff"}
SHARED_WIDTH = {"expert_shared_feed_forward_length": "mixture.feed_forward.shared.d_ff"}
DEEPSEEK_ROUTER = (
    "feed_forward.router.score",
    "feed_forward.router.normalize",
    "feed_forward.router.scale",
)
LITE_DEPTHS = (26, 27)
"""Numbers of layers by which llama.cpp recognises DeepSeek-V2-Lite and similar models."""
LATENT_SIZES = tuple(
    f"attention.{size}" for size in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
)
DEEPSEEK_GROUPS = tuple(
    f"feed_forward.router.{field}" for field in ("n_groups", "top_groups", "group_score")
)
GATING = {"softmax": 1, "sigmoid": 2}


def _leading_dense(data: Data) -> int:
    kinds = [layer["feed_forward"]["kind"] for layer in data["layers"]]
    return kinds.index("moe")


def _shared_experts(data: Data) -> int:
    """Width of the shared expert, in multiples of a routed expert's width."""
    mixture = data["mixture"]["feed_forward"]
    return mixture["shared"]["d_ff"] // mixture["d_ff"]


DEEPSEEK_KEYS = {
    **EXPERT_WIDTH,
    "leading_dense_block_count": _leading_dense,
    "expert_shared_count": _shared_experts,
    "expert_weights_scale": "mixture.feed_forward.router.scale",
    "expert_weights_norm": "mixture.feed_forward.router.normalize",
    "expert_gating_func": lambda data: GATING[data["mixture"]["feed_forward"]["router"]["score"]],
}


def solve_deepseek(keys: Data) -> Data:
    """Compute the shared expert's width and the router's score function from the file's keys."""
    width = keys["expert_shared_count"] * keys["expert_feed_forward_length"]
    scores = {number: score for score, number in GATING.items()}
    return {
        "mixture.feed_forward.shared.d_ff": width,
        "mixture.feed_forward.router.score": scores[keys.get("expert_gating_func", 1)],
    }


def mixtures_follow_dense(data: Data) -> str | None:
    """Return an error message if the layer order or the shared expert's width is not supported.

    Dense layers must come before layers with experts. The shared expert's width must be a multiple
    of a routed expert's width.
    """
    kinds = [layer["feed_forward"]["kind"] for layer in data["layers"]]
    if "moe" not in kinds or "moe" in kinds[: kinds.count("gated_mlp")]:
        return "layers without experts do not all come before layers with experts"
    mixture = data["layers"][-1]["feed_forward"]
    if mixture["shared"]["d_ff"] % mixture["d_ff"]:
        return "the shared expert's width is not a multiple of a routed expert's width"
    return None


LATENT = LatentAttentionConfig(
    n_heads=1,
    q_rank=1,
    kv_rank=1,
    nope_dim=1,
    rope_dim=2,
    value_dim=1,
    position=RopeConfig(pairing="interleaved"),
)


def deepseek(data: Data) -> str | None:
    """Return an error message if llama.cpp cannot compute this variant of DeepSeek."""
    attention = data["layers"][0]["attention"]
    scaling = attention["position"]["scaling"]
    growth = 1.0
    if scaling is not None:
        yarn = YarnScalingConfig.from_dict(scaling)
        if not math.isclose(yarn.amplitude, 1.0):
            return "mscale is not equal to mscale_all_dim"
        growth = yarn.growth(yarn.mscale_all_dim or 1.0)
    scale = growth**2 / math.sqrt(attention["nope_dim"] + attention["rope_dim"])
    if not math.isclose(attention["scale"] or scale, scale):
        return f"attention.scale is {attention['scale']}, not {scale}"
    if attention["position"]["pairing"] != "interleaved":
        return "attention.position.pairing is 'half', not 'interleaved'"
    if data["n_layers"] in LITE_DEPTHS and attention["q_rank"] is not None:
        return f"{data['n_layers']} layers mean DeepSeek-V2-Lite in llama.cpp, which has no q_rank"
    router = data["layers"][-1]["feed_forward"].get("router", {})
    if router.get("n_groups", 1) > 1 and router["group_score"] != "top2_sum":
        return f"router.group_score is {router['group_score']!r}, not 'top2_sum'"
    return mixtures_follow_dense(data)


def _latent(data: Data, *paths: str) -> int:
    return sum(data["block"]["attention"][path] for path in paths)


def _yarn_log_multiplier(data: Data) -> float:
    return 0.1 * data["block"]["attention"]["position"]["scaling"]["mscale_all_dim"]


def solve_latent(keys: Data) -> Data:
    """Compute the fields of `solve_deepseek`, latent attention and YaRN from the file's keys."""
    turning = keys["rope.dimension_count"]
    found = solve_deepseek(keys) | {
        "block.attention.q_rank": keys.get("attention.q_lora_rank") or None,
        "block.attention.rope_dim": turning,
        "block.attention.nope_dim": keys["attention.key_length_mla"] - turning,
        "block.attention.value_dim": keys["attention.value_length_mla"],
    }
    if keys.get("expert_group_count", 1) > 1:
        found["mixture.feed_forward.router.group_score"] = "top2_sum"
    if keys.get("rope.scaling.type") == "yarn":
        mscale = round(keys["rope.scaling.yarn_log_multiplier"] / 0.1, 6)
        found["block.attention.position.scaling.mscale"] = mscale
        found["block.attention.position.scaling.mscale_all_dim"] = mscale
        growth = 0.1 * mscale * math.log(keys["rope.scaling.factor"]) + 1
        found["block.attention.scale"] = growth**2 / math.sqrt(keys["attention.key_length_mla"])
    return found


MIXTURES: tuple[Architecture, ...] = (
    Architecture(
        "qwen3moe",
        ("qwen3_moe",),
        (LLAMA.replace(attention=NORMED, feed_forward=MIXTURE),),
        optional=(TIE, *ATTENTION_BIASES),
        keys=EXPERT_WIDTH,
    ),
    Architecture(
        "qwen2moe",
        ("qwen2_moe",),
        (
            LLAMA.replace(
                feed_forward=UNNORMALISED.replace(shared=SWIGLU, shared_gate=True),
            ),
        ),
        optional=(TIE, "attention.qkv_bias"),
        keys={**EXPERT_WIDTH, **SHARED_WIDTH},
        copied_head=True,
        square=True,
    ),
    Architecture(
        "gpt-oss",
        ("gpt_oss",),
        (
            LLAMA.replace(attention=SINKS, feed_forward=GPT_OSS),
            LLAMA.replace(attention=SINKS.replace(window=1), feed_forward=GPT_OSS),
        ),
        carried=(WINDOW,),
        varying=(WINDOW,),
        names={"feed_forward_norm": "post_attention_norm"},
        keys=EXPERT_WIDTH,
        copied_head=True,
        check=some_window,
        window_every=2,
    ),
    Architecture(
        "olmoe",
        ("olmoe",),
        (LLAMA.replace(attention=ROTARY.replace(qk_norm=FULL_NORM), feed_forward=UNNORMALISED),),
        copied_head=True,
        square=True,
        check=equal_heads,
    ),
    Architecture(
        "granitemoe",
        ("granitemoe", "granitemoeshared"),
        (
            LLAMA.replace(residual_multiplier=0.5, feed_forward=MIXTURE),
            LLAMA.replace(residual_multiplier=0.5, feed_forward=SHARED),
        ),
        embedding=EmbeddingConfig(multiplier=2.0),
        head=HeadConfig(multiplier=0.5),
        carried=GRANITE,
        optional=(TIE, *ATTENTION_BIASES),
        pairing="interleaved",
        keys={**SHARED_WIDTH, **GRANITE_KEYS},
        solved=divided_logits,
    ),
    Architecture(
        "hunyuan-moe",
        ("hunyuan_v1_moe",),
        (
            LLAMA.replace(
                attention=ROTARY.replace(qk_norm=QKNormConfig(norm=RMS, after_rope=True)),
                feed_forward=SHARED,
            ),
        ),
        optional=(TIE, "attention.qkv_bias"),
        keys={**EXPERT_WIDTH, **SHARED_WIDTH},
    ),
    Architecture(
        "dots1",
        ("dots1",),
        (
            LLAMA.replace(attention=NORMED),
            LLAMA.replace(attention=NORMED, feed_forward=SHARED),
        ),
        carried=DEEPSEEK_ROUTER,
        optional=(TIE, "attention.qkv_bias", "feed_forward.router.selection_bias"),
        varying=("feed_forward.d_ff",),
        keys=DEEPSEEK_KEYS,
        solved=solve_deepseek,
        copied_head=True,
        check=lambda data: equal_heads(data) or mixtures_follow_dense(data),
    ),
    Architecture(
        "glm4moe",
        ("glm4_moe",),
        tuple(
            LLAMA.replace(attention=attention, feed_forward=feed_forward)
            for attention in (ROTARY, NORMED)
            for feed_forward in (
                SWIGLU,
                SHARED.replace(router=RouterConfig(normalize=True, selection_bias=True)),
            )
        ),
        carried=(*DEEPSEEK_ROUTER, FRACTION),
        optional=(TIE, "attention.qkv_bias"),
        varying=("feed_forward.d_ff",),
        names={"feed_forward_norm": "post_attention_norm"},
        keys=DEEPSEEK_KEYS,
        solved=solve_deepseek,
        check=mixtures_follow_dense,
    ),
    Architecture(
        "deepseek2",
        ("deepseek_v2", "deepseek_v3"),
        (
            LLAMA.replace(attention=LATENT),
            LLAMA.replace(attention=LATENT, feed_forward=SHARED),
        ),
        carried=(*DEEPSEEK_ROUTER, *LATENT_SIZES, *DEEPSEEK_GROUPS),
        optional=(
            TIE,
            "attention.q_rank",
            "attention.scale",
            "feed_forward.router.selection_bias",
        ),
        varying=("feed_forward.d_ff",),
        scalings=("yarn",),
        pairing="interleaved",
        names={"attention.q_norm": "attn_q_a_norm"},
        fused={"attn_kv_a_mqa": ("attn_kv_a", "attn_k_rope")},
        keys={
            **DEEPSEEK_KEYS,
            "attention.head_count_kv": lambda _: 1,
            "attention.q_lora_rank": lambda data: data["block"]["attention"]["q_rank"] or 0,
            "attention.kv_lora_rank": "block.attention.kv_rank",
            "attention.key_length": lambda data: _latent(data, "kv_rank", "rope_dim"),
            "attention.value_length": "block.attention.kv_rank",
            "attention.key_length_mla": lambda data: _latent(data, "nope_dim", "rope_dim"),
            "attention.value_length_mla": "block.attention.value_dim",
            "expert_group_count": "mixture.feed_forward.router.n_groups",
            "expert_group_used_count": "mixture.feed_forward.router.top_groups",
            "rope.scaling.attn_factor": lambda _: None,  # llama.cpp derives it from the multiplier
            "rope.scaling.yarn_log_multiplier": _yarn_log_multiplier,
        },
        check=deepseek,
        solved=solve_latent,
    ),
)
