"""Layers with quantised weights: their results and their state."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workhorse.native import resolve
from workhorse.native.decoding import LANES
from workhorse.nn.experts.mixture import GroupedLinear, group_sorted, grouped_product
from workhorse.transforms import quantization
from workhorse.transforms.quantization import (
    FormatName,
    QuantizedGroupedLinear,
    QuantizedLinear,
)

FORMATS: tuple[FormatName, ...] = get_args(FormatName)


@pytest.mark.parametrize("format", FORMATS)
def test_with_gradients_it_is_the_product_with_the_codes(format: FormatName) -> None:
    layer = QuantizedLinear.of(nn.Linear(50, 37), format)
    x = torch.randn(2, 3, 50, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, F.linear(x, layer.dequantized(torch.float32), layer.bias))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], layer.dequantized(torch.float32).sum(0))


@pytest.mark.parametrize("format", FORMATS)
def test_groups_with_gradients(format: FormatName) -> None:
    experts = GroupedLinear(3, 50, 37)
    nn.init.normal_(experts.weight)
    layer = QuantizedGroupedLinear.of(experts, format)
    groups = group_sorted(torch.tensor([0, 0, 2]), 3)
    x = torch.randn(3, 50)
    weight = layer.dequantized(torch.float32)
    assert weight.shape == experts.weight.shape
    for expert in range(3):
        alone = nn.Linear(50, 37, bias=False)
        alone.weight.data = experts.weight[expert].detach()
        assert torch.equal(
            weight[expert], QuantizedLinear.of(alone, format).dequantized(torch.float32)
        )
    assert torch.equal(layer(x, groups), grouped_product(x, weight, groups.ends))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_the_dequantised_weight(
    format: FormatName, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with blocks smaller than the weight, an unused matrix, and a trained bias."""
    monkeypatch.setattr(quantization, "BLOCK", 2 * LANES * 50)  # 32 of 70 rows
    if stacked:
        base = GroupedLinear(3, 50, 70, bias=True)
        nn.init.normal_(base.weight)
        nn.init.normal_(base.bias)
        layer = QuantizedGroupedLinear.of(base, format)
        groups = (group_sorted(torch.tensor([0, 0, 2, 2, 2]), 3),)
    else:
        base = nn.Linear(50, 70)
        layer, groups = QuantizedLinear.of(base, format), ()
    base = base.double()
    base.weight.data = layer.dequantized(torch.float64)
    x = torch.randn(5, 50, dtype=torch.float64, requires_grad=True)
    got, wanted = layer.double()(x, *groups), base(x, *groups)
    torch.testing.assert_close(got, wanted)
    above = torch.randn_like(wanted)
    assert layer.bias is not None
    made = torch.autograd.grad(got, [x, layer.bias], above)
    torch.testing.assert_close(made, torch.autograd.grad(wanted, [x, base.bias], above))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_does_not_depend_on_gradients(dtype: torch.dtype) -> None:
    operators = resolve("decoding", wait=True).decoding
    layer = QuantizedLinear.of(nn.Linear(64, 48, dtype=dtype), "int4", operators)
    x = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        before = layer(x)
    assert torch.equal(layer(x.requires_grad_()), before)


def test_codes_survive_a_cast() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 32).bfloat16(), "int4")
    before = layer.dequantized(torch.float32)
    assert torch.equal(layer.double().bfloat16().dequantized(torch.float32), before)


def test_state_comes_back() -> None:
    layer = QuantizedLinear.of(nn.Linear(50, 37), "int4")
    other = QuantizedLinear(torch.Size((37, 50)), "int4", nn.Parameter(torch.zeros(37)))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 50)
    assert torch.equal(other(x), layer(x))
