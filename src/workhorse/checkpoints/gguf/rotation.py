"""Rotations in a GGUF file: their metadata, factors that are tensors, and the order of rows."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from workhorse.nn.rope import (
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    YarnScalingConfig,
    inverse_powers,
)

Pairing = Literal["half", "interleaved"]


def rope_metadata(rope: RopeConfig, head_dim: int) -> Mapping[str, object]:
    """Keys of the `rope.` section, without the architecture's name.

    YaRN's amplitude is llama.cpp's own `0.1 ln(factor) + 1` times `attn_factor`.
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


def rope_tensors(rope: RopeConfig, head_dim: int) -> dict[str, Tensor]:
    """Divisors of the frequencies, `(rotary_dim / 2,)` each, where a scaling needs them."""
    match rope.scaling:
        case Llama3ScalingConfig() as llama3:
            width, cpu = rope.rotary_dim(head_dim), torch.device("cpu")
            plain = inverse_powers(rope.theta, width, cpu)
            return {"rope_freqs.weight": plain / llama3.frequencies(rope, width, 0, cpu)}
        case LongRopeScalingConfig(short_factor=short, long_factor=long):
            return {
                "rope_factors_short.weight": torch.tensor(short),
                "rope_factors_long.weight": torch.tensor(long),
            }
        case _:
            return {}


def paired(rows: Tensor, head_dim: int, rotary_dim: int, ours: Pairing, theirs: Pairing) -> Tensor:
    """Rows of a projection in the order in which the other pairing turns the same features.

    Args:
        rows: (heads · head_dim, ...); of each head the first `rotary_dim` turn.
        head_dim: width of a head.
        rotary_dim: an even number.
        ours: how the rows are paired, a feature with its neighbour or with the other half.
        theirs: how they shall be.
    """
    if ours == theirs:
        return rows
    heads_first = rows.unflatten(0, (-1, head_dim))
    turning, rest = heads_first[:, :rotary_dim], heads_first[:, rotary_dim:]
    shape = (2, -1) if ours == "half" else (-1, 2)
    turning = turning.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
    return torch.cat((turning, rest), dim=1).flatten(0, 1)
