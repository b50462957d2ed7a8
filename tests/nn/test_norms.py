"""Norms compared with their formulas in float64."""

import pytest
import torch
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.nn.norms import LayerNormConfig, NoNormConfig, RMSNormConfig

WIDTH = 7


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape) + 2).to(dtype)


def fill(norm: torch.nn.Module) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.data = torch.randn_like(parameter)
    return norm


LAYER_NORMS = [
    {},
    {"bias": False},
    {"weight": False, "bias": False},
    {"weight": False},
    {"offset": True},
    {"offset": True, "bias": False, "precision": "float32"},
    {"precision": "float32"},
    {"precision": "low"},
    {"eps": 0.1},
]


@pytest.mark.parametrize("options", LAYER_NORMS, ids=str)
def test_layer_norm_is_its_formula(options: dict[str, object]) -> None:
    """`(x - mean) / sqrt(var + eps) * weight + bias`: the variance biased, eps inside the root."""
    config = LayerNormConfig(**options)
    norm = fill(config.build(WIDTH))
    x = numbers(2, 3, WIDTH)
    wide = x.double()
    mean = wide.sum(-1, keepdim=True) / WIDTH
    variance = ((wide - mean) ** 2).sum(-1, keepdim=True) / WIDTH
    expected = (wide - mean) / (variance + config.eps) ** 0.5
    if config.weight:
        expected = expected * (norm.weight.double() + (1.0 if config.offset else 0.0))
    if config.bias:
        expected = expected + norm.bias.double()
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)
    assert {n for n, _ in norm.named_parameters()} == {
        n for n in ("weight", "bias") if getattr(config, n)
    }


RMS_NORMS = [
    {},
    {"offset": True},
    {"weight": False},
    {"multiply": "before_cast"},
    {"offset": True, "multiply": "before_cast"},
    {"eps": 0.1},
]


@pytest.mark.parametrize("options", RMS_NORMS, ids=str)
def test_rms_norm_is_its_formula(options: dict[str, object]) -> None:
    """`x / sqrt(mean(x²) + eps) * weight`."""
    config = RMSNormConfig(**options)
    norm = fill(config.build(WIDTH))
    x = numbers(2, 3, WIDTH)
    wide = x.double()
    expected = wide / ((wide**2).sum(-1, keepdim=True) / WIDTH + config.eps) ** 0.5
    if config.weight:
        expected = expected * (norm.weight.double() + (1.0 if config.offset else 0.0))
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [LayerNormConfig(), LayerNormConfig(offset=True), RMSNormConfig(), RMSNormConfig(offset=True)],
    ids=str,
)
def test_a_fresh_norm_has_weight_1(config: LayerNormConfig | RMSNormConfig) -> None:
    norm = config.build(WIDTH)
    y = norm(numbers(50, WIDTH))
    assert torch.allclose(y.square().mean(-1), torch.ones(50), atol=1e-3)
    assert norm.weight.eq(0.0 if config.offset else 1.0).all()


def test_where_the_weight_is_multiplied_decides_the_rounding_in_bfloat16() -> None:
    """LLaMA rounds the normalised value, then the product; OLMo 2 and Gemma only the product."""
    x = numbers(64, WIDTH, dtype=torch.bfloat16)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    weight = torch.randn(WIDTH).bfloat16()
    results = {}
    for multiply in ("after_cast", "before_cast"):
        norm = RMSNormConfig(multiply=multiply).build(WIDTH).bfloat16()
        norm.weight.data = weight
        results[multiply] = norm(x)
    assert torch.equal(results["after_cast"], weight * normed.bfloat16())
    assert torch.equal(results["before_cast"], (weight.float() * normed).bfloat16())
    assert not torch.equal(results["after_cast"], results["before_cast"])


@pytest.mark.parametrize("weight", [True, False])
def test_float32_layer_norm_computes_in_float32(weight: bool) -> None:
    norm = LayerNormConfig(precision="float32", weight=weight, bias=weight).build(WIDTH).bfloat16()
    x = numbers(64, WIDTH, dtype=torch.bfloat16)
    expected = torch.nn.functional.layer_norm(x.float(), (WIDTH,), eps=1e-5).bfloat16()
    assert torch.equal(norm(x), expected)
    assert norm(x).dtype == torch.bfloat16


def test_low_precision_layer_norm_gives_the_autocast_type() -> None:
    x = numbers(64, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert LayerNormConfig(precision="low").build(WIDTH)(x).dtype == torch.bfloat16
        assert LayerNormConfig().build(WIDTH)(x).dtype == torch.float32


def test_no_norm_changes_nothing() -> None:
    x = numbers(2, WIDTH)
    assert NoNormConfig().build(WIDTH)(x) is x


@pytest.mark.parametrize("config", [LayerNormConfig, RMSNormConfig])
def test_an_offset_needs_a_weight(config: type[LayerNormConfig] | type[RMSNormConfig]) -> None:
    with pytest.raises(
        ConfigError, match=r"^offset=true needs a weight; set weight=true or offset"
    ):
        config(offset=True, weight=False)
