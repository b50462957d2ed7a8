"""Sinusoidal and learned positions, and ALiBi's slopes, compared with the papers."""

import numpy as np
import pytest
import torch

from workhorse.nn.attention.masks import AttentionPattern, Placement, alibi_bias
from workhorse.nn.positions.absolute import (
    AlibiConfig,
    LearnedPositionConfig,
    LearnedPositions,
    SinusoidalPositionConfig,
    SinusoidalPositions,
    alibi_slopes,
)


def waves(d_model: int, seq: int = 40, **options: object) -> np.ndarray:
    module = SinusoidalPositions(d_model, SinusoidalPositionConfig(**options))
    return module.vectors(torch.arange(seq)[None])[0].double().numpy()


@pytest.mark.parametrize("d_model", [2, 8, 15, 64])
def test_sinusoidal_positions_are_the_papers(d_model: int) -> None:
    """`p[s, 2i] = sin(s / 10000^(2i/d))`, `p[s, 2i+1] = cos(same)`; odd widths end in a sine."""
    expected = np.zeros((40, d_model))
    for s in range(40):
        for feature in range(d_model):
            angle = s / 10_000 ** (2 * (feature // 2) / d_model)
            expected[s, feature] = np.cos(angle) if feature % 2 else np.sin(angle)
    assert np.allclose(waves(d_model), expected, atol=1e-5)


@pytest.mark.parametrize("d_model", [8, 15])
def test_the_halves_layout_is_the_same_waves_in_another_order(d_model: int) -> None:
    """CTRL: all sines, then all cosines."""
    plain = waves(d_model)
    order = [*range(0, d_model, 2), *range(1, d_model, 2)]
    assert np.array_equal(waves(d_model, layout="halves"), plain[:, order])


def test_xglms_waves() -> None:
    """Sines first, the exponent divided by half - 1, positions offset by 2."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.xglm.modeling_xglm")
    assert transformers is not None
    theirs = module.XGLMSinusoidalPositionalEmbedding(64, 16).get_embedding(64, 16)
    ours = waves(16, layout="halves", spacing="half_minus_one", offset=2)
    assert np.allclose(ours, theirs[2:42].double().numpy(), atol=1e-5)


def test_theta_sets_the_slowest_wave() -> None:
    slow = waves(8, theta=50.0, spacing="half_minus_one", layout="halves")[:, 3]
    assert np.allclose(slow, np.sin(np.arange(40) / 50.0), atol=1e-5)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_add_the_row_of_a_table(offset: int) -> None:
    learned = LearnedPositionConfig(offset=offset).build(6, 4)
    assert isinstance(learned, LearnedPositions)
    assert learned.table.weight.shape == (6 + offset, 4)
    x = torch.randn(1, 6, 4)
    added = learned(x, torch.arange(6)[None]) - x
    assert torch.allclose(added[0], learned.table.weight[offset:], atol=1e-6)


def test_alibis_slopes_for_8_heads_are_the_papers() -> None:
    """2108.12409 §3: 1/2, 1/4, … 1/256."""
    assert alibi_slopes(8) == tuple(2.0**-head for head in range(1, 9))


def test_alibis_slopes_for_16_heads_are_the_papers() -> None:
    """1/2^0.5, 1/2^1, 1/2^1.5 … 1/2^8."""
    assert alibi_slopes(16) == pytest.approx([2.0 ** (-head / 2) for head in range(1, 17)])


def test_alibis_slopes_for_12_heads_interleave() -> None:
    """The slopes of 8 heads, then every second slope of 16, as in the authors' code."""
    expected = [2.0**-head for head in range(1, 9)]
    expected += [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert alibi_slopes(12) == pytest.approx(expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 12, 20, 71])
def test_alibis_slopes_equal_the_reference(heads: int) -> None:
    module = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = module.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(torch.tensor(alibi_slopes(heads)), theirs, rtol=1e-5)


@pytest.mark.parametrize("heads", [4, 6])
def test_mpts_bound_on_the_bias(heads: int) -> None:
    module = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    theirs = module.build_mpt_alibi_tensor(heads, 2, alibi_bias_max=4)[:, 0, 0]
    assert torch.allclose(torch.tensor(AlibiConfig(max_bias=4).slopes(heads)), -theirs, rtol=1e-5)


def place(queries: list[int], keys: list[int]) -> Placement:
    return Placement(torch.tensor([queries]), torch.tensor([keys]))


def test_alibi_takes_the_slope_for_each_step_of_distance() -> None:
    pattern = AttentionPattern(alibi_slopes=(0.5, 0.25), alibi_scale=0.1)
    bias = alibi_bias(pattern, place([3, 4], [0, 3, 4]))
    assert bias.shape == (1, 2, 2, 3)
    distance = torch.tensor([[3.0, 0.0, 1.0], [4.0, 1.0, 0.0]])
    assert torch.allclose(bias[0, 0], -0.05 * distance)
    assert torch.allclose(bias[0, 1], -0.025 * distance)


def test_falcons_bias_is_rounded_to_bfloat16() -> None:
    module = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    seq, heads = 300, 6
    theirs = module.build_alibi_tensor(torch.ones(1, seq, dtype=torch.int64), heads, torch.float32)
    pattern = AttentionPattern(alibi_slopes=alibi_slopes(heads), alibi_bfloat16=True)
    ours = alibi_bias(pattern, place([seq - 1], list(range(seq))))
    assert torch.equal(ours.flatten(), theirs.flatten())
    exact = alibi_bias(AttentionPattern(alibi_slopes=alibi_slopes(heads)), place([0], [299]))
    assert ours[..., -1].flatten().tolist() != exact.flatten().tolist()
