"""Rotations compared with complex numbers, and every scaling with transformers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.nn.positions.rope import RopeConfig, rotate_half, rotate_interleaved


def rotated(rope: RopeConfig, x: Tensor, positions: Tensor, length: int = 1) -> Tensor:
    cos, sin = rope.angles(positions, x.shape[-1], length)
    turn = rotate_half if rope.pairing == "half" else rotate_interleaved
    return turn(x, cos, sin)


def by_complex_numbers(rope: RopeConfig, x: Tensor, positions: Tensor) -> np.ndarray:
    """Pair (a, b) as a + bi, times e^(i · s · theta^(-2i/d)), in float64."""
    features = x.double().numpy()
    rotary = int(x.shape[-1] * rope.fraction)
    pairs = np.arange(rotary // 2)
    first, second = pairs, pairs + rotary // 2
    if rope.pairing == "interleaved":
        first, second = 2 * pairs, 2 * pairs + 1
    angle = positions.double().numpy()[:, None, :, None] * rope.theta ** (-2 * pairs / rotary)
    turn = np.exp(1j * angle * (-1 if rope.reverse else 1))
    z = (features[..., first] + 1j * features[..., second]) * turn
    result = features.copy()
    result[..., first], result[..., second] = z.real, z.imag
    return result


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_rotation_is_a_product_of_complex_numbers(
    pairing: str, fraction: float, reverse: bool
) -> None:
    rope = RopeConfig(theta=1000.0, pairing=pairing, fraction=fraction, reverse=reverse)
    x = torch.randn(2, 3, 9, 16)
    positions = torch.stack([torch.arange(9), torch.arange(9) + 20])
    expected = torch.from_numpy(by_complex_numbers(rope, x, positions))
    assert torch.allclose(rotated(rope, x, positions).double(), expected, atol=1e-5)


def test_the_pairings_differ() -> None:
    x, positions = torch.randn(1, 1, 4, 8), torch.arange(4)[None]
    half = rotated(RopeConfig(pairing="half"), x, positions)
    interleaved = rotated(RopeConfig(pairing="interleaved"), x, positions)
    assert (half - interleaved).abs().max() > 0.1
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # a checkpoint conversion reorders each head's features
    assert torch.allclose(
        rotated(RopeConfig(pairing="half"), x[..., order], positions), interleaved[..., order]
    )


@settings(max_examples=50)
@given(
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.sampled_from(["half", "interleaved"]),
    st.booleans(),
)
def test_scores_depend_on_the_distance_alone(
    position: int, distance: int, pairing: str, reverse: bool
) -> None:
    rope = RopeConfig(pairing=pairing, reverse=reverse)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> Tensor:
        turned_q = rotated(rope, q, torch.tensor([[i]]))
        return (turned_q * rotated(rope, k, torch.tensor([[j]]))).sum()

    assert torch.allclose(score(position + distance, position), score(distance, 0), atol=1e-3)


SCALINGS = [
    ("linear", {"factor": 4.0}, 100),
    ("dynamic_ntk", {"factor": 4.0, "original_max_seq_len": 32}, 20),
    ("dynamic_ntk", {"factor": 4.0, "original_max_seq_len": 32}, 100),
    ("yarn", {"factor": 8.0, "original_max_seq_len": 64}, 100),
    ("yarn", {"factor": 8.0, "original_max_seq_len": 64, "truncate": False}, 100),
    ("yarn", {"factor": 8.0, "original_max_seq_len": 64, "beta_fast": 4.0, "beta_slow": 0.5}, 1),
    ("yarn", {"factor": 8.0, "original_max_seq_len": 64, "attention_factor": 1.3}, 1),
    ("yarn", {"factor": 40.0, "original_max_seq_len": 64, "mscale": 0.7, "mscale_all_dim": 1.0}, 1),
    ("yarn", {"factor": 1.0, "original_max_seq_len": 64}, 1),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 64,
        },
        100,
    ),
    (
        "longrope",
        {
            "factor": 4.0,
            "original_max_seq_len": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7],
        },
        20,
    ),
]
SCALINGS += [
    (SCALINGS[-1][0], SCALINGS[-1][1], 100),
    (SCALINGS[-1][0], {**SCALINGS[-1][1], "attention_factor": 1.4}, 100),
]


@pytest.mark.parametrize(("kind", "options", "length"), SCALINGS)
def test_scalings_equal_the_reference(kind: str, options: dict[str, object], length: int) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = RopeConfig(theta=10_000.0, scaling={"kind": kind, **options})
    theirs = {
        "rope_type": "dynamic" if kind == "dynamic_ntk" else kind,
        "rope_theta": 10_000.0,
        **options,
    }
    original = theirs.pop("original_max_seq_len", 32)
    theirs["original_max_position_embeddings"] = original
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,  # head_dim 16
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=original if kind == "dynamic_ntk" else 1024,
        rope_parameters=theirs,
    )
    compute = rope_utils.ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    frequencies, amplitude = compute(config, torch.device("cpu"), seq_len=length)
    positions = torch.arange(length)[None]
    cos, sin = rope.angles(positions, 16, length)
    angles = positions[0].float()[:, None] * frequencies.float()
    assert torch.allclose(cos[0, 0], angles.cos() * amplitude, atol=1e-6)
    assert torch.allclose(sin[0, 0], angles.sin() * amplitude, atol=1e-6)


def test_yarns_ramp_by_hand() -> None:
    """Pairs with more than 32 turns over the original length stay; under one turn: divided."""
    rope = RopeConfig(
        theta=10_000.0, scaling={"kind": "yarn", "factor": 4.0, "original_max_seq_len": 2048}
    )
    plain = 10_000.0 ** (-np.arange(64) / 64)
    turns = 2048 * plain / (2 * math.pi)
    cos, sin = rope.angles(torch.tensor([[1]]), 128, 1)
    frequencies = torch.atan2(sin, cos).flatten().double().numpy()
    fast, slow = turns > 40, turns < 0.8
    assert fast.sum() > 10
    assert slow.sum() > 10
    assert np.allclose(frequencies[fast], plain[fast], rtol=1e-4)
    assert np.allclose(frequencies[slow], plain[slow] / 4, rtol=1e-4)
    assert (np.diff(frequencies / plain) <= 1e-4).all()
    assert torch.allclose(cos.hypot(sin), torch.tensor(0.1 * math.log(4) + 1))


def test_angles_are_float32_whatever_the_model_is() -> None:
    cos, _ = RopeConfig().angles(torch.tensor([[100_001]]), 8, 1)
    assert cos.dtype == torch.float32
    assert cos[0, 0, 0, 0].item() == pytest.approx(math.cos(100_001), abs=1e-3)


def test_only_two_scalings_depend_on_the_length() -> None:
    dependent = {
        kind
        for kind, options, _ in SCALINGS
        if RopeConfig(scaling={"kind": kind, **options}).depends_on_length
    }
    assert dependent == {"dynamic_ntk", "longrope"}


LONGROPE = {"kind": "longrope", "factor": 4.0, "original_max_seq_len": 32}


@pytest.mark.parametrize(
    ("options", "head_dim", "message"),
    [
        ({}, 5, "fraction=1.0 of head_dim=5 rotates 5 features, which cannot be paired; choose a"),
        ({"fraction": 0.1}, 8, "fraction=0.1 of head_dim=8 rotates 0 features, which cannot be"),
        (
            {"scaling": {**LONGROPE, "kind": "yarn"}, "fraction": 0.65},
            8,
            "fraction=0.65 of head_dim=8 rotates 5 features, which cannot be paired; choose a",
        ),
        (
            {"scaling": {**LONGROPE, "short_factor": [1, 1], "long_factor": [1]}},
            4,
            "longrope has 2 short and 1 long factors for 2 pairs; give one factor per pair",
        ),
        (
            {"scaling": {"kind": "dynamic_ntk", "factor": 2, "original_max_seq_len": 8}},
            2,
            "dynamic_ntk needs at least two pairs; choose a wider head_dim",
        ),
    ],
)
def test_a_rotation_that_does_not_fit(
    options: dict[str, object], head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RopeConfig(**options).rotary_dim(head_dim)
    assert str(caught.value).startswith(message)


def test_llama3_factors_must_be_apart() -> None:
    with pytest.raises(ConfigError, match=r"high_freq_factor=1\.0 is not above low_freq_factor=1"):
        RopeConfig(
            scaling={
                "kind": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 1,
                "original_max_seq_len": 8,
            }
        )
