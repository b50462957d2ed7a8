"""A list of small decoders that covers every option of `nn`, and a strategy that draws more.

`FACTORS` (in `grid_factors.py`) lists the factors that can vary. Every factor has kinds, and every
kind has variants. `COVERING` contains each pair of kinds of two factors at least once, and each
variant at least once. `test_grid.py` asserts that it covers every field of every config class.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from tests.nn.grid_factors import FACTORS, Variant, rope
from workhorse.nn import AttentionConfig, Decoder, DecoderConfig
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.positions.rope import DynamicNtkScalingConfig, LongRopeScalingConfig, RopeConfig

Choice = dict[str, tuple[str, int]]  # factor -> (kind, index of its variant)


def assemble(choice: Choice, wider: int = 1) -> DecoderConfig:
    """The config for one choice of kinds and variants; `wider` multiplies d_model and heads."""
    parts = {
        factor: kinds[choice[factor][0]][choice[factor][1] % len(kinds[choice[factor][0]])]
        for factor, kinds in FACTORS.items()
    }
    odd, mixed = choice["heads"][0] == "odd", choice["reach"][0] == "mixed"
    d_model = wider * (15 if odd else 16 if choice["reach"][0] == "chunk" else 24)
    n_layers = 3 if mixed else 2
    attention = {**parts["heads"], **parts["qk_norm"], **parts["scores"], **parts["extras"]}
    attention |= {key: wider * size for key, size in attention.items() if key.endswith("_dim")}
    latent = choice["heads"][0] == "latent"
    if latent:  # latent attention lacks the other options
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
        **parts["convolution"],
        "norm": parts["norm"],
        "attention": {**attention, **parts["reach"]},
        "feed_forward": {"d_ff": 20 if odd else 16, **parts["feed_forward"]},
    }
    blocks, pattern = {"main": block}, ()
    if mixed:
        blocks = {"local": block, "global": {**block, "attention": attention}}
        full_length = choice["wiring"][0] in ("pre_norm", "parallel")
        pattern = ("local", "local", "global") if full_length else ("local", "global")
    head, init = parts["head"], parts["init"]
    if head.get("tied"):
        init = {**init, "head": "plain"}
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
            "head": head,
            "init": init,
        }
    )


def fit_position(position: Variant, head_dim: int, reach: Variant) -> Variant:
    """Adapt a position to the head: whole pairs, one divisor per pair, causal if rounded."""
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
    """Choices that contain every pair of kinds and every variant; greedy and deterministic."""
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
    """A decoder in evaluation mode, with weights that are large enough for every part to matter.

    Without norms the weights are smaller, because a squared activation would amplify rounding
    errors too much.
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
    """True if the shapes of some matmuls depend on the tokens.

    Other tokens then change the results of a token by rounding errors.
    """
    return any(isinstance(block.feed_forward, MoEConfig) for block in config.blocks.values())


def refused(config: DecoderConfig, kernel: str) -> bool:
    """True if a kernel does not support a config; independent of the kernels' own `refusal`."""
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
    """The length up to which no angle depends on the sequence length; None: any length."""
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
    """The largest difference, relative to the largest reference value if that is above 1."""
    return ((ours - reference).abs().max() / reference.abs().max().clamp(min=1.0)).item()


@functools.cache
def name(index: int) -> str:
    """A readable name of one config of `COVERING`."""
    choice = CHOICES[index]
    return "-".join(
        [str(index), *(choice[f][0] for f in ("wiring", "position", "reach", "scores"))]
    )
