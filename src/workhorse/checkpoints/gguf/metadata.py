"""Metadata keys of a model in a GGUF file: sizes, norms, rotations, kinds of layers."""

import math
import struct
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from workhorse.checkpoints.gguf.architecture import Architecture, Data
from workhorse.models.huggingface.family import MISSING, FieldPath, look_up
from workhorse.nn.positions.rope import (
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    YarnScalingConfig,
    inverse_powers,
)

FREQUENCIES = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (FREQUENCIES, SHORT_FACTORS, LONG_FACTORS)
Pairing = Literal["half", "interleaved"]


def rope_metadata(rope: RopeConfig, head_dim: int) -> Mapping[str, object]:
    """Return the metadata keys of RoPE (`rope.…`), without the architecture's name.

    llama.cpp computes YaRN's amplitude as `attn_factor * (0.1 ln(factor) + 1)`. The key
    `rope.scaling.attn_factor` is the factor that gives our amplitude.
    """
    keys: dict[str, object] = {
        "rope.dimension_count": rope.rotary_dim(head_dim),
        "rope.freq_base": rope.theta,
    }
    match rope.scaling:
        case LinearScalingConfig(factor=factor):
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScalingConfig() as yarn:
            keys |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_max_seq_len,
                "rope.scaling.attn_factor": yarn.amplitude / yarn.growth(1.0),
            }
        case LongRopeScalingConfig() as long:
            keys |= {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": long.original_max_seq_len,
                "rope.scaling.attn_factor": long.amplitude,
            }
        case _:
            pass
    return keys


def shortest(number: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-06, not 9.9999999e-07."""
    try:
        (stored,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return number
    for digits in range(6, 10):
        short = float(f"{number:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short)) == (stored,):
            return short
    return number


def read_scaling(
    keys: Mapping[str, Any], factors: Mapping[str, Tensor], rope: Data, width: int, length: int
) -> Data | None:
    """Read the RoPE scaling of a file, as `rope_metadata` and `rope_tensors` write it.

    Args:
        keys: metadata keys, without the architecture's name.
        factors: tensors that RoPE frequencies are divided by, by name.
        rope: config of the rotary embedding without scaling, as plain data.
        width: number of rotated features.
        length: context length.

    Raises:
        ValueError: the kind of scaling is unknown, or the divisors do not follow Llama 3's rule.
        KeyError: a key of the scaling is missing.
    """
    original: Any = keys.get("rope.scaling.original_context_length")
    stretch = keys.get("rope.scaling.attn_factor", 1.0)
    match keys.get("rope.scaling.type", "none"):
        case "linear":
            return {"kind": "linear", "factor": keys["rope.scaling.factor"]}
        case "yarn":
            given = {"factor": keys["rope.scaling.factor"], "original_max_seq_len": original}
            yarn = YarnScalingConfig.from_dict({"kind": "yarn", **given})
            own = {} if stretch == 1 else {"attention_factor": shortest(stretch * yarn.growth(1.0))}
            return yarn.to_dict() | own
        case "longrope":
            names = {"short": SHORT_FACTORS, "long": LONG_FACTORS}
            lists = {
                f"{key}_factor": [shortest(one) for one in factors[name].tolist()]
                for key, name in names.items()
            }
            extent = {"original_max_seq_len": original, "factor": max(length / original, 1.0)}
            return {"kind": "longrope", **lists, **extent, "attention_factor": stretch}
        case "none":
            pass
        case other:
            raise ValueError(f"rope.scaling.type {other!r} is unknown")
    if FREQUENCIES not in factors:
        return None
    return _llama3(factors[FREQUENCIES], rope, width)


def _llama3(divisors: Tensor, rope: Data, width: int) -> Data:
    """Find the Llama 3 RoPE scaling that gives these frequency divisors.

    `low_freq_factor` is assumed to be 1 and `high_freq_factor` 4. A pair of features that makes
    between 1 and 4 rotations (`waves`) in the original length keeps a share of its frequency,
    `kept = (waves - 1) / 3`. Its divisor `1 / ((1 - kept) / factor + kept)` determines that length.
    """
    plain = inverse_powers(rope["theta"], width, torch.device("cpu"))
    factor = round(float(divisors.max()), 4)
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    # near the ends, float32 rounding would dominate the solution
    between = (kept > 0.01) & (kept < 0.99)  # noqa: PLR2004
    lengths = ((1 + 3 * kept) * 2 * math.pi / plain)[between]
    for original in {round(float(one)) for one in lengths} or {8192}:
        scaling = Llama3ScalingConfig(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_seq_len=original,
        )
        made = RopeConfig.from_dict(rope | {"scaling": scaling.to_dict()})
        if torch.allclose(rope_tensors(made, width)[FREQUENCIES], divisors, rtol=1e-5):
            return scaling.to_dict()
    raise ValueError(f"{FREQUENCIES} holds divisors that do not follow Llama 3's rule")


def rope_tensors(rope: RopeConfig, head_dim: int) -> dict[str, Tensor]:
    """Return the divisors of RoPE frequencies, `(rotary_dim / 2,)`, by tensor name, if any."""
    match rope.scaling:
        case Llama3ScalingConfig() as llama3:
            width, cpu = rope.rotary_dim(head_dim), torch.device("cpu")
            plain = inverse_powers(rope.theta, width, cpu)
            return {FREQUENCIES: plain / llama3.frequencies(rope.theta, width, 0, cpu)}
        case LongRopeScalingConfig(short_factor=short, long_factor=long):
            return {
                SHORT_FACTORS: torch.tensor(short),
                LONG_FACTORS: torch.tensor(long),
            }
        case _:
            return {}


def paired(rows: Tensor, head_dim: int, rotary_dim: int, ours: Pairing, theirs: Pairing) -> Tensor:
    """Reorder the rows of a projection from one RoPE pairing to another, for the same result.

    Args:
        rows: (heads · head_dim, ...); the first `rotary_dim` rows of each head are rotated.
        head_dim: width of a head.
        rotary_dim: number of rotated features; even.
        ours: current pairing of features: adjacent (`interleaved`), or one from each half (`half`).
        theirs: pairing after reordering.
    """
    if ours == theirs:
        return rows
    heads_first = rows.unflatten(0, (-1, head_dim))
    turning, rest = heads_first[:, :rotary_dim], heads_first[:, rotary_dim:]
    shape = (2, -1) if ours == "half" else (-1, 2)
    turning = turning.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat((turning, rest), dim=1).flatten(0, 1)


EVERYWHERE: dict[str, FieldPath] = {
    "vocab_size": "vocab_size",
    "context_length": "max_seq_len",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "block.feed_forward.d_ff",
    "attention.head_count": "block.attention.n_heads",
    "attention.head_count_kv": "block.attention.n_kv_heads",
    "attention.key_length": "block.attention.head_dim",
    "attention.value_length": "block.attention.value_dim",
    "expert_count": "mixture.feed_forward.n_experts",
    "expert_used_count": "mixture.feed_forward.top_k",
}
OWN_CONFIG = "workhorse.config"
"""Key of Workhorse's own config as JSON. It must agree with the keys that llama.cpp reads."""
EPSILON = {
    "rms_norm": "attention.layer_norm_rms_epsilon",
    "layer_norm": "attention.layer_norm_epsilon",
}


def model_metadata(architecture: Architecture, data: Data) -> Mapping[str, Any]:
    """Return the metadata keys that begin with the architecture's name, and their values.

    Args:
        architecture: an architecture that fits the model.
        data: the config as plain data, from `write.readable`.
    """
    layers: list[Data] = data["layers"]
    mixtures = [layer for layer in layers if layer["feed_forward"]["kind"] == "moe"]
    data = data | {"block": layers[0], "mixture": next(iter(mixtures), {})}
    norm = data["block"]["norm"]
    keys: dict[str, object] = {**_rotation(layers), EPSILON[norm["kind"]]: norm["eps"]}
    if architecture.windows:
        keys |= _windows(layers)
    paths = {**EVERYWHERE, **architecture.keys}
    keys |= {key: look_up(data, path) for key, path in paths.items()}
    return {
        f"{architecture.name}.{key}": value
        for key, value in keys.items()
        if value is not None and value is not MISSING
    }


def _rotation(layers: list[Data]) -> dict[str, object]:
    """Return the metadata keys of RoPE.

    They describe the layers without a window. Layers with a window only have a key for theta.
    """
    turning = [layer["attention"] for layer in layers if _turns(layer)]
    if not turning:
        return {}
    wide = [attention for attention in turning if attention["window"] is None]
    local = [attention for attention in turning if attention["window"] is not None]
    first = (wide or local)[0]
    width = first["head_dim"] if "head_dim" in first else first["rope_dim"]
    keys = dict(rope_metadata(RopeConfig.from_dict(first["position"]), width))
    if local:
        keys["rope.freq_base_swa"] = local[0]["position"]["theta"]
    return keys


def _turns(layer: Data) -> bool:
    return layer["attention"]["position"]["kind"] == "rope"


def _windows(layers: list[Data]) -> dict[str, object]:
    windows: list[int | None] = [layer["attention"]["window"] for layer in layers]
    width = next((window for window in windows if window is not None), None)
    if width is None:
        return {}
    pattern = [window is not None for window in windows]
    return {"attention.sliding_window": width, "attention.sliding_window_pattern": pattern}
