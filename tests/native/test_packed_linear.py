"""`Decoding.packed_linear` against float64; x has its fixed-point error."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.native.machine import DECODING, needs
from workhorse.devices.instructions import cpu_has
from workhorse.nn.experts.mixture import GroupedLinear, group_sorted
from workhorse.transforms.quantization import (
    FormatName,
    QuantizedGroupedLinear,
    QuantizedLinear,
)

FIXED = 2**-15.9  # relative to the largest element of each group of x
MANY_ROWS = 12  # from here on, in bfloat16, W is expanded for the matrix unit
FORMATS: list[FormatName] = ["int8", "int4"]
SHAPES = [(64, 64), (37, 50), (16, 33), (1, 1), (130, 768)]


pytestmark = needs("decoding")


def groups_largest(x: Tensor) -> Tensor:
    """Each element replaced by the largest magnitude of its group."""
    width = x.shape[-1]
    groups = F.pad(x.abs(), (0, -width % 32)).unflatten(-1, (-1, 32))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., :width]


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *, rounded: bool) -> None:
    """Check within the error of x, or of W if it was rounded to bfloat16, and y's rounding."""
    exact = F.linear(x.double(), weight.double(), bias.double())
    if rounded:
        error = F.linear(x.double().abs(), weight.double().abs()) * 2**-8.9
    else:
        error = F.linear(groups_largest(x.double()), weight.double().abs()) * FIXED
    assert y.dtype == x.dtype
    last_bit = exact.abs() * torch.finfo(x.dtype).eps
    assert ((y.double() - exact).abs() <= last_bit + error + 1e-6).all(), len(x)


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_product(format: FormatName, out: int, width: int) -> None:
    layer = QuantizedLinear.of(nn.Linear(width, out).bfloat16(), format, DECODING)
    assert layer.bias is not None
    for rows in (1, 2, 3, 4, 7, 11, 12, 16, 17, 33, 49, 300):
        x = torch.randn(rows, width).bfloat16()
        rounded = rows >= MANY_ROWS and cpu_has("amx_bf16")
        check(layer(x), x, layer.dequantized(torch.float32), layer.bias, rounded=rounded)


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_product_in_float32(format: FormatName, out: int, width: int) -> None:
    layer = QuantizedLinear.of(nn.Linear(width, out), format, DECODING)
    assert layer.bias is not None
    for rows in (1, 3, 6, 40):
        x = torch.randn(rows, width)
        check(layer(x), x, layer.dequantized(torch.float32), layer.bias, rounded=False)


@torch.no_grad()
def test_a_prompt_of_several_passes() -> None:
    layer = QuantizedLinear.of(nn.Linear(32 * 700, 20).bfloat16(), "int8", DECODING)
    x = torch.randn(150, 32 * 700).bfloat16()
    apart = torch.cat([layer(x[:32]), layer(x[32:])])
    assert torch.equal(layer(x), apart)


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_group_has_its_weight(format: FormatName, dtype: torch.dtype) -> None:
    experts = GroupedLinear(5, 50, 37, bias=True)
    nn.init.normal_(experts.weight)
    nn.init.normal_(experts.bias)
    layer = QuantizedGroupedLinear.of(experts.to(dtype), format, DECODING)
    of_row = torch.tensor([0] * 3 + [2] * 20 + [3])  # two groups are empty
    x = torch.randn(len(of_row), 50, dtype=dtype)
    y = layer(x, group_sorted(of_row, 5))
    for expert in (0, 2, 3):
        one = QuantizedLinear.of(nn.Linear(50, 37).to(dtype), format, DECODING)
        one.codes, one.scales = layer.codes[expert], layer.scales[expert]
        one.bias = None
        here = of_row == expert
        assert torch.equal(y[here], one(x[here]) + layer.bias[expert])


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_extremes(format: FormatName) -> None:
    linear = nn.Linear(64, 16, bias=False)
    nn.init.zeros_(linear.weight)
    linear.weight.data[3, 32:] = 1e30
    layer = QuantizedLinear.of(linear.bfloat16(), format, DECODING)
    for rows in (2, 20):
        x = torch.zeros(rows, 64).bfloat16()
        x[1, 32:] = 1e-30
        with torch.no_grad():
            y = layer(x)
        assert y[0].tolist() == [0.0] * 16
        assert y[1].float().tolist() == pytest.approx([0.0] * 3 + [32.0] + [0.0] * 12, rel=0.01)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_no_number_stays_so(special: float, rows: int, dtype: torch.dtype) -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 20, dtype=dtype), "int8", DECODING)
    x = torch.ones(rows, 64, dtype=dtype)
    x[0, 3] = special
    with torch.no_grad():
        y = layer(x)
    assert y[0].isfinite().logical_not().all()
    assert y[1:].isfinite().all()


def test_compiler_traces_it() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 48).bfloat16(), "int4", DECODING)
    x = torch.randn(2, 64).bfloat16()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


def test_refused() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 48, bias=False).bfloat16(), "int8", DECODING)
    packed = (layer.codes, layer.scales, None)
    x = torch.zeros(2, 64)
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float32"):
        DECODING.packed_linear(x.double(), *packed, out_features=48)
    with pytest.raises(RuntimeError, match="as wide as the groups"):
        DECODING.packed_linear(x[:, :32], *packed, out_features=48)
    with pytest.raises(RuntimeError, match="codes is not a contiguous CPU tensor"):
        DECODING.packed_linear(x, *packed, out_features=49)
    with pytest.raises(RuntimeError, match="bias is not a contiguous CPU tensor"):
        DECODING.packed_linear(x, *packed, torch.zeros(48).bfloat16(), out_features=48)
    with pytest.raises(RuntimeError, match="codes must have 4 axes"):
        DECODING.packed_linear(x, *packed, ends=torch.tensor([2]).int(), out_features=48)


@pytest.mark.parametrize("ends", [[1, 3], [2, 1], [-1, 2]])
def test_groups_that_cannot_be(ends: list[int]) -> None:
    layer = QuantizedGroupedLinear.of(GroupedLinear(2, 64, 48), "int8", DECODING)
    x, stacked = torch.zeros(2, 64), (layer.codes, layer.scales, None)
    with pytest.raises(RuntimeError, match="ends must not decrease or exceed the rows of x"):
        DECODING.packed_linear(x, *stacked, ends=torch.tensor(ends).int(), out_features=48)
