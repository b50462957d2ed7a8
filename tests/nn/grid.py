"""A list of small decoders that covers every option of `nn`, and a strategy that draws more.

`FACTORS` names what can vary; every factor has kinds and every kind has variants. `COVERING` holds
each pair of kinds of two factors at least once, and each variant at least once. `test_grid.py`
asserts that no field of any config class escapes it.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from workhorse.nn import AttentionConfig, Decoder, DecoderConfig
from workhorse.nn.latent_attention import LatentAttentionConfig
from workhorse.nn.moe import MoEConfig
from workhorse.nn.rope import DynamicNtkScalingConfig, LongRopeScalingConfig, RopeConfig

Variant = dict[str, Any]
Choice = dict[str, tuple[str, int]]  # factor -> (kind, which of its variants)

ORIGINAL_LENGTH = 8  # of scaled rotations, shorter than the texts of most tests


def rope(scaling: Variant | None = None, **fields: Any) -> Variant:
    return {"kind": "rope", "theta": 100.0, "scaling": scaling, **fields}


def scaling(kind: str, **fields: Any) -> Variant:
    return {"kind": kind, "factor": 4.0, "original_max_seq_len": ORIGINAL_LENGTH, **fields}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTATIONS = {
    "half": [rope(), rope(theta=500.0)],
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
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid", "xielu")
RMS, LAYER = {"kind": "rms_norm"}, {"kind": "layer_norm"}

LATENT = {"kind": "latent_attention", "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
LATENTS = [
    {**LATENT, "n_heads": 4},
    {**LATENT, "n_heads": 3, "q_rank": 7, "kv_rank": 6, "norm": {"eps": 1e-3}},
    {**LATENT, "n_heads": 2, "q_rank": 12, "nope_dim": 3, "rope_dim": 8, "value_dim": 8},
]
ROUTERS = [
    {"score": "softmax"},
    {"score": "softmax", "normalize": True, "bias": True},
    {"score": "sigmoid", "scale": 2.5, "selection_bias": True},
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
MIXTURES = [
    *(
        {**MIXTURE, "activation": name, "router": router}
        for name, router in zip(ACTIVATIONS, ROUTERS, strict=True)
    ),
    {**MIXTURE, "weigh": "input", "router": {"score": "sigmoid"}, "shared": {"d_ff": 6}},
    {**MIXTURE, "n_experts": 5, "top_k": 5, "shared": {"d_ff": 8}, "shared_gate": True},
    {**MIXTURE, "bias": True, "dropout": 0.1, "clamped": {}, "router": ROUTERS[1]},
    {**MIXTURE, "top_k": 1, "clamped": {"limit": 0.5, "alpha": 1.0}},
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
            {"scale_by_layer": True},
            {"query_scaling": {"scale": 0.3, "length": 4}},
            {"query_scaling": {"scale": 0.5, "length": 3, "offset": 1}},
        ],
        "clip": [{"clip": 0.5}],
    },
    "extras": {
        "none": [{}],
        "biases": [{"qkv_bias": True}, {"out_bias": True}, {"qkv_bias": True, "out_bias": True}],
        "gate": [{"output_gate": True}],
        "dropout": [{"dropout": 0.1}],
    },
    "feed_forward": {
        "mlp": [{"kind": "mlp", "activation": name} for name in ACTIVATIONS]
        + [{"kind": "mlp", "bias": True, "dropout": 0.1}],
        "gated_mlp": [{"kind": "gated_mlp", "activation": name} for name in ACTIVATIONS]
        + [{"kind": "gated_mlp", "bias": True, "dropout": 0.1}],
        "clamped_gated_mlp": [
            {"kind": "clamped_gated_mlp"},
            {"kind": "clamped_gated_mlp", "limit": 0.5, "alpha": 1.0, "bias": False},
            {"kind": "clamped_gated_mlp", "dropout": 0.1},
        ],
        "moe": MIXTURES,
    },
    "embedding": {
        "plain": [{}],
        "multiplied": [{"multiplier": 2.0}],
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


def assemble(choice: Choice) -> DecoderConfig:
    """The config of one choice of kinds and variants."""
    parts = {
        factor: kinds[choice[factor][0]][choice[factor][1] % len(kinds[choice[factor][0]])]
        for factor, kinds in FACTORS.items()
    }
    odd, mixed = choice["heads"][0] == "odd", choice["reach"][0] == "mixed"
    d_model = 15 if odd else 16 if choice["reach"][0] == "chunk" else 24
    n_layers = 3 if mixed else 2
    attention = {**parts["heads"], **parts["qk_norm"], **parts["scores"], **parts["extras"]}
    latent = choice["heads"][0] == "latent"
    if latent:  # what else the other factors say is for other attention
        known = LatentAttentionConfig.model_fields
        attention = {field: value for field, value in attention.items() if field in known}
    position = rope() if latent and parts["position"]["kind"] != "rope" else parts["position"]
    head_dim = attention.get("rope_dim") or attention.get("head_dim")
    head_dim = head_dim or d_model // attention["n_heads"]
    attention["position"] = fit_position(position, head_dim, parts["reach"])
    if attention["position"]["kind"] != "rope" and "qk_norm" in attention:
        attention["qk_norm"] = {**attention["qk_norm"], "after_rope": False}
    block = {
        **parts["wiring"],
        **parts["branch"],
        "norm": parts["norm"],
        "attention": {**attention, **parts["reach"]},
        "feed_forward": {"d_ff": 20 if odd else 16, **parts["feed_forward"]},
    }
    blocks, pattern = {"main": block}, ()
    if mixed:
        blocks = {"local": block, "global": {**block, "attention": attention}}
        full_length = choice["wiring"][0] in ("pre_norm", "parallel")
        pattern = ("local", "local", "global") if full_length else ("local", "global")
    return DecoderConfig.from_dict(
        {
            "vocab_size": 31 if odd else 29,
            "d_model": d_model,
            "n_layers": n_layers,
            "max_seq_len": 32 if odd else 24,
            "embedding": {**parts["embedding"], "position": parts["embedding_position"]},
            "blocks": blocks,
            "pattern": pattern,
            "final_norm": parts["final_norm"],
            "head": parts["head"],
            "init": parts["init"],
        }
    )


def fit_position(position: Variant, head_dim: int, reach: Variant) -> Variant:
    """A position that suits that head: whole pairs, a divisor for each, no rounding both ways."""
    if position["kind"] == "alibi" and not reach.get("causal", True):
        return {**position, "bfloat16": False}
    if position["kind"] != "rope":
        return position
    rotary_dim = int(head_dim * position.get("fraction", 1.0)) // 2 * 2
    position = {**position, "fraction": (rotary_dim + 0.5) / head_dim}
    if rotary_dim == head_dim:
        position["fraction"] = 1.0
    stretch = position["scaling"]
    if stretch is not None and stretch["kind"] == "longrope":
        short = [1 + 0.1 * pair for pair in range(rotary_dim // 2)]
        long = [stretch["factor"] + pair for pair in range(rotary_dim // 2)]
        position["scaling"] = {**stretch, "short_factor": short, "long_factor": long}
    return position


def pairwise() -> Iterator[Choice]:
    """Choices that hold every pair of kinds, and then every variant; greedy, always the same."""
    turns = {
        (factor, kind): itertools.count() for factor, kinds in FACTORS.items() for kind in kinds
    }
    unused = {
        (factor, kind): len(variants)
        for factor, kinds in FACTORS.items()
        for kind, variants in kinds.items()
    }
    missing = {
        ((f, a), (g, b))
        for f, g in itertools.combinations(FACTORS, 2)
        for a, b in itertools.product(FACTORS[f], FACTORS[g])
    }
    shuffled = random.Random(0)
    while missing or any(count > 0 for count in unused.values()):
        row: dict[str, str] = dict(min(missing)) if missing else {}
        factors = [factor for factor in FACTORS if factor not in row]
        shuffled.shuffle(factors)
        for factor in factors:
            row[factor] = max(
                FACTORS[factor],
                key=lambda kind: (
                    sum(pair(factor, kind, *other) in missing for other in row.items()),
                    unused[factor, kind],
                ),
            )
        missing -= {pair(*one, *two) for one, two in itertools.combinations(row.items(), 2)}
        for item in row.items():
            unused[item] -= 1
        yield {factor: (row[factor], next(turns[factor, row[factor]])) for factor in FACTORS}


def pair(f: str, a: str, g: str, b: str) -> tuple[tuple[str, str], tuple[str, str]]:
    order = list(FACTORS)
    return ((f, a), (g, b)) if order.index(f) < order.index(g) else ((g, b), (f, a))


CHOICES = list(pairwise())
COVERING: list[DecoderConfig] = [assemble(choice) for choice in CHOICES]
CAUSAL = [
    config for config in COVERING if all(block.attention.causal for block in config.blocks.values())
]
configs: st.SearchStrategy[DecoderConfig] = st.fixed_dictionaries(
    {
        factor: st.sampled_from(
            [(kind, turn) for kind, variants in kinds.items() for turn in range(len(variants))]
        )
        for factor, kinds in FACTORS.items()
    }
).map(assemble)
"""Any combination of variants."""


def make(config: DecoderConfig, kernel: str = "auto", seed: int = 0) -> Decoder:
    """A decoder in evaluation mode whose weights are large enough for every part to matter.

    Without norms they are smaller: a squared activation would make rounding errors as large.
    """
    decoder = config.build(kernel).eval()
    generator = torch.Generator().manual_seed(seed)
    unnormed = any(block.norm.kind == "none" for block in config.blocks.values())
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]) * (0.5 if unnormed else 1))
    return decoder


def random_tokens(config: DecoderConfig, rows: int, seq: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (rows, seq), generator=generator)


def mixes_experts(config: DecoderConfig) -> bool:
    """Whether some products have shapes that depend on the tokens.

    What a token gives is then the same to rounding, but not to the bit, whatever the others are.
    """
    return any(isinstance(block.feed_forward, MoEConfig) for block in config.blocks.values())


def refused(config: DecoderConfig, kernel: str) -> bool:
    """Whether that kernel cannot express that config, said independently of the kernels."""
    attentions = [block.attention for block in config.blocks.values()]
    match kernel:
        case "sdpa":
            ordinary = [a for a in attentions if isinstance(a, AttentionConfig)]
            return any(a.softcap is not None or a.sinks for a in ordinary)
        case "flex" | "flex-uncompiled":
            return any(a.dropout > 0 for a in attentions)
        case _:
            return False


def fixed_length(config: DecoderConfig) -> int | None:
    """The length up to which no angle depends on the length of the text; None: any length."""
    stretches = [
        block.attention.position.scaling.original_max_seq_len
        for block in config.blocks.values()
        if isinstance(block.attention.position, RopeConfig)
        and isinstance(
            block.attention.position.scaling, DynamicNtkScalingConfig | LongRopeScalingConfig
        )
    ]
    return min(stretches, default=None)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the largest reference value where that is above 1."""
    return ((ours - reference).abs().max() / reference.abs().max().clamp(min=1.0)).item()


@functools.cache
def name(index: int) -> str:
    """A readable name of one config of `COVERING`."""
    choice = CHOICES[index]
    return "-".join(
        [str(index), *(choice[f][0] for f in ("wiring", "position", "reach", "scores"))]
    )
