"""Errors of quantised elements."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.transforms.quantization import (
    FORMATS,
    FormatName,
    decode,
    encode,
    level_table,
    shape_of_codes,
)

NAMES: tuple[FormatName, ...] = get_args(FormatName)
BITS = {"int8": 8.5, "int4": 4.5}


def there_and_back(weight: Tensor, name: FormatName) -> tuple[Tensor, Tensor]:
    """Dequantised elements and their scales, both with the shape of the weight."""
    shape = shape_of_codes(*weight.shape, FORMATS[name])
    codes = torch.empty(shape, dtype=torch.uint8)
    scales = torch.empty(*shape[:2], 16, dtype=torch.int16)
    encode(weight, codes, scales, FORMATS[name])
    stored = scales.view(torch.bfloat16).float().transpose(1, 2).flatten(0, 1)
    per_number = stored.repeat_interleave(32, 1)
    rows, columns = weight.shape
    found = decode(codes, scales, level_table(FORMATS[name]))
    return found[:rows, :columns], per_number[:rows, :columns]


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (37, 50), (1, 1), (700, 1000)])
def test_int8_is_within_half_a_step(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    found, scale = there_and_back(weight, "int8")
    assert ((found - weight).abs() <= scale.abs() * 0.5001).all()


def test_int4_error() -> None:
    weight = torch.randn(512, 1024)
    found, scale = there_and_back(weight, "int4")
    error = found - weight
    # Evenly spaced levels with the scale of the largest element have 0.0074.
    assert error.square().mean() < 0.0058
    assert (error.abs() <= scale.abs() * 12.5001).float().mean() > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_size(name: FormatName) -> None:
    blocks, groups, size = shape_of_codes(32, 64, FORMATS[name])
    assert blocks * groups * (size + 32) * 8 == BITS[name] * 32 * 64


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_zeros(name: FormatName) -> None:
    assert not there_and_back(torch.zeros(20, 40), name)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_quantising_again_changes_nothing_of_levels(name: FormatName) -> None:
    once, _ = there_and_back(torch.randn(32, 64), name)
    twice, _ = there_and_back(once, name)
    torch.testing.assert_close(twice, once, rtol=0.01, atol=0.01 * once.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_how_a_weight_lies_in_memory_says_nothing(name: FormatName) -> None:
    weight = torch.randn(70, 50).bfloat16()
    turned = weight.T.contiguous().T
    for one, other in zip(there_and_back(weight, name), there_and_back(turned, name), strict=True):
        assert torch.equal(one, other)


def test_groups_are_of_a_row() -> None:
    weight = F.pad(torch.ones(16, 32), (0, 32), value=1e-3)
    found, _ = there_and_back(weight, "int8")
    torch.testing.assert_close(found, weight, rtol=2**-8, atol=0)
