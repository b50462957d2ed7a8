"""Options of a decoder as data: factors, kinds of each factor, variants of each kind."""

from itertools import cycle
from typing import Any, get_args

from workhorse.nn.feedforward import ActivationName

Variant = dict[str, Any]

ORIGINAL_LENGTH = 8  # of scaled rotations; shorter than the sequences of most tests


def rope(scaling: Variant | None = None, **fields: Any) -> Variant:
    return {"kind": "rope", "theta": 100.0, "scaling": scaling, **fields}


def scaling(kind: str, **fields: Any) -> Variant:
    return {"kind": kind, "factor": 4.0, "original_max_seq_len": ORIGINAL_LENGTH, **fields}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTATIONS = {
    "half": [rope(), rope(theta=500.0), rope(precision="float32")],
    "interleaved": [
        rope(pairing="interleaved"),
        rope(pairing="interleaved", fraction=0.5),
        rope(fraction=0.5, reverse=True),
    ],
    "stretched": [
        rope({"kind": "linear", "factor": 4.0}),
        rope({"kind": "linear", "factor": 2.0}),
        rope(scaling("yarn")),
        rope(scaling("yarn", factor=8.0, mscale=0.7, mscale_all_dim=1.0, beta_fast=4.0)),
        rope(scaling("yarn", truncate=False, attention_factor=1.1, beta_slow=0.5)),
        rope({**scaling("yarn"), "original_max_seq_len": 6}),
        rope(scaling("llama3", **LLAMA3)),
        rope({**scaling("llama3"), "low_freq_factor": 0.5, "high_freq_factor": 2.0, "factor": 2.0}),
        rope({**scaling("llama3", **LLAMA3), "original_max_seq_len": 6}),
    ],
    "by_length": [
        rope(scaling("dynamic_ntk")),
        rope({**scaling("dynamic_ntk"), "factor": 2.0, "original_max_seq_len": 10}),
        rope(scaling("longrope")),
        rope({**scaling("longrope", attention_factor=1.2), "factor": 2.0}),
        rope({**scaling("longrope"), "original_max_seq_len": 10}),
    ],
}
ALIBI = [
    {"kind": "alibi"},
    {"kind": "alibi", "scaled": True},
    {"kind": "alibi", "max_bias": 4.0},
    {"kind": "alibi", "scaled": True, "bfloat16": True},
]
LAYER_NORM = [
    {"kind": "layer_norm"},
    {"kind": "layer_norm", "bias": False, "eps": 1e-3},
    {"kind": "layer_norm", "offset": True, "precision": "low"},
]
RMS_NORM = [
    {"kind": "rms_norm"},
    {"kind": "rms_norm", "offset": True, "multiply": "before_cast"},
    {"kind": "rms_norm", "eps": 1e-3},
]
ACTIVATIONS = get_args(ActivationName)
RMS, LAYER = {"kind": "rms_norm"}, {"kind": "layer_norm"}

LATENT = {"kind": "latent_attention", "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
LATENTS = [
    {**LATENT, "n_heads": 4},
    {**LATENT, "n_heads": 3, "q_rank": 7, "kv_rank": 6, "norm": {"eps": 1e-3}, "out_bias": True},
    {**LATENT, "n_heads": 2, "q_rank": 12, "nope_dim": 3, "rope_dim": 8, "value_dim": 8},
]
ROUTERS = [
    {"score": "softmax"},
    {"score": "softmax", "normalize": True, "bias": True},
    {"score": "sigmoid", "scale": 2.5, "selection_bias": True, "bias_on": "logit"},
    {"score": "softmax", "n_groups": 4, "top_groups": 2},
    {
        "score": "sigmoid",
        "normalize": True,
        "selection_bias": True,
        "n_groups": 2,
        "top_groups": 1,
        "group_score": "top2_sum",
    },
    {"score": "sparsemixer", "jitter": 0.2},
    {"score": "sparsemixer", "jitter": 0.05, "bias": True},
]
MIXTURE = {"kind": "moe", "n_experts": 8, "top_k": 2}
LONGER = max(ACTIVATIONS, ROUTERS, key=len)
MIXTURES = [
    *(
        {**MIXTURE, "activation": name, "router": router}
        for name, router, _ in zip(cycle(ACTIVATIONS), cycle(ROUTERS), LONGER, strict=False)
    ),
    {**MIXTURE, "weigh": "input", "router": {"score": "sigmoid"}, "shared": {"d_ff": 6}},
    {**MIXTURE, "n_experts": 5, "top_k": 5, "shared": {"d_ff": 8}, "shared_gate": True},
    {**MIXTURE, "bias": True, "dropout": 0.1, "clamped": {}, "router": ROUTERS[1]},
    {**MIXTURE, "top_k": 1, "clamped": {"limit": 0.5, "alpha": 1.0}},
    {**MIXTURE, "shared": {"d_ff": 6}, "multiplier": 0.5, "output_norm": RMS},
]

FACTORS: dict[str, dict[str, list[Variant]]] = {
    "wiring": {
        "pre_norm": [{"kind": "pre_norm"}, {"kind": "pre_norm", "norm_attention": False}],
        "normed_residual": [{"kind": "pre_norm", "norm_residual": True}],
        "post_norm": [{"kind": "post_norm"}],
        "reordered_norm": [{"kind": "reordered_norm"}],
        "sandwich_norm": [{"kind": "sandwich_norm"}],
        "parallel": [{"kind": "parallel"}],
        "parallel_two_norms": [{"kind": "parallel", "norms": 2}],
    },
    "branch": {
        "plain": [{}],
        "changed": [{"residual_multiplier": 0.5}, {"dropout": 0.2}],
        "both": [{"residual_multiplier": 0.7, "dropout": 0.1}],
    },
    "convolution": {
        "none": [{}],
        "both": [{"convolution": {"width": 3}}, {"convolution": {"width": 2}}],
        "one": [{"convolution": {"before": [part]}} for part in ("attention", "feed_forward")],
    },
    "norm": {
        "layer_norm": LAYER_NORM,
        "bare_layer_norm": [{**LAYER, "weight": False, "bias": False, "precision": "float32"}],
        "rms_norm": RMS_NORM,
        "bare_rms_norm": [{**RMS, "weight": False}],
        "none": [{"kind": "none"}],
    },
    "heads": {
        "multi_head": [{"n_heads": 4}],
        "grouped": [
            {"n_heads": 4, "n_kv_heads": 2},
            {"n_heads": 6, "n_kv_heads": 2, "head_dim": 6},
        ],
        "multi_query": [{"n_heads": 4, "n_kv_heads": 1}],
        "odd": [{"n_heads": 3}],  # in a d_model of 15: head_dim is 5
        "wide_values": [
            {"n_heads": 4, "value_dim": 12},
            {"n_heads": 3, "head_dim": 8, "value_dim": 5},
        ],
        "latent": LATENTS,
    },
    "position": {"none": [{"kind": "none"}], **ROTATIONS, "alibi": ALIBI},
    "reach": {
        "all": [{}],
        "window": [{"window": 3}],
        "chunk": [{"chunk": 4}],
        "mixed": [{"window": 5}],  # every second layer; the others see all
        "bidirectional": [{"causal": False}],
    },
    "qk_norm": {
        "none": [{}],
        "head": [{"qk_norm": {"norm": RMS}}, {"qk_norm": {"norm": LAYER, "after_rope": True}}],
        "each_head": [{"qk_norm": {"norm": {**LAYER, "bias": False}, "over": "each_head"}}],
        "full": [{"qk_norm": {"norm": RMS, "over": "full"}}],
    },
    "scores": {
        "plain": [{}],
        "softcap": [{"softcap": 2.0}],
        "sinks": [{"sinks": True}],
        "scaled": [
            {"scale": 0.2},
            {"scale": 0.4, "scale_by_layer": True},
            {"query_scaling": {"scale": 0.3, "length": 4}},
            {"query_scaling": {"scale": 0.5, "length": 3, "offset": 1}},
        ],
        "clip": [{"clip": 0.5}],
    },
    "extras": {
        "none": [{}],
        "biases": [{"qkv_bias": True}, {"out_bias": True}, {"qkv_bias": True, "out_bias": True}],
        "gate": [{"output_gate": True}],
        "inner_norm": [{"inner_norm": RMS}, {"inner_norm": LAYER, "output_gate": True}],
        "dropout": [{"dropout": 0.1}],
    },
    "feed_forward": {
        "mlp": [{"kind": "mlp", "activation": name} for name in ACTIVATIONS]
        + [{"kind": "mlp", "bias": True, "dropout": 0.1}, {"kind": "mlp", "inner_norm": LAYER}],
        "gated_mlp": [{"kind": "gated_mlp", "activation": name} for name in ACTIVATIONS]
        + [
            {"kind": "gated_mlp", "bias": True, "dropout": 0.1},
            {"kind": "gated_mlp", "activation": "relu2", "inner_norm": RMS},
        ],
        "clamped_gated_mlp": [
            {"kind": "clamped_gated_mlp"},
            {"kind": "clamped_gated_mlp", "limit": 0.5, "alpha": 1.0, "bias": False},
            {"kind": "clamped_gated_mlp", "dropout": 0.1},
        ],
        "moe": MIXTURES,
    },
    "embedding": {
        "plain": [{}],
        "multiplied": [{"multiplier": 2.0}, {"multiplier": 5.1, "round_multiplier": True}],
        "normed": [{"norm": LAYER, "dropout": 0.1}],
        "narrow": [{"width": 6}],
    },
    "embedding_position": {
        "none": [{"kind": "none"}],
        "learned": [{"kind": "learned"}, {"kind": "learned", "offset": 2}],
        "sinusoidal": [
            {"kind": "sinusoidal"},
            {"kind": "sinusoidal", "layout": "halves", "theta": 100.0},
            {"kind": "sinusoidal", "layout": "halves", "spacing": "half_minus_one", "offset": 2},
        ],
    },
    "head": {
        "untied": [{}],
        "tied": [{"tied": True}],
        "bias": [{"bias": True}],
        "cap": [{"cap": 3.0}, {"cap": 5.0, "multiplier": 0.5}],
        "transform": [
            *({"transform": {"norm": LAYER, "activation": name}} for name in ACTIVATIONS),
            {"transform": {"norm": RMS, "bias": True}, "tied": True},
        ],
    },
    "final_norm": {"none": [{"kind": "none"}], "normed": [LAYER, RMS]},
    "init": {
        kind: [
            {"kind": kind},
            {"kind": kind, "residual": "plain", "embedding_std": 0.5, **size},
            {"kind": kind, "residual": "zero", "head": "zero"},
        ]
        for kind, size in (
            ("normal", {"std": 0.1}),
            ("fan_in", {"gain": 0.5}),
            ("xavier", {}),
            ("he", {}),
        )
    },
}
