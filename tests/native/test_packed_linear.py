"""`native.packed_linear` against float64, x being within its fixed-point error."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse import native
from workhorse.transforms.quantize import FormatName, QuantizedLinear

FIXED = 2**-15.9  # of the largest number of each group of x
FORMATS: list[FormatName] = ["int8", "int4"]


@pytest.fixture(autouse=True)
def _packs(operators: None) -> None:
    if not native.packs():
        pytest.skip("the CPU has no avx512_vnni")


def groups_largest(x: Tensor) -> Tensor:
    """Each number replaced by the largest magnitude of its group."""
    width = x.shape[-1]
    groups = F.pad(x.abs(), (0, -width % 32)).unflatten(-1, (-1, 32))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., :width]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), [(64, 64), (37, 50), (16, 33), (1, 1), (130, 768)])
def test_product(format: FormatName, out: int, width: int) -> None:
    layer = QuantizedLinear.of(nn.Linear(width, out).bfloat16(), format)
    weight, bias = layer.dequantized(torch.float32).double(), layer.bias
    assert bias is not None
    for rows in (1, 2, 3, 4, 7, 31, 32, 33, 70, 300):
        x = torch.randn(rows, width).bfloat16()
        with torch.no_grad():
            y = layer(x).double()
        exact = F.linear(x.double(), weight, bias.double())
        if rows < 32:
            error = F.linear(groups_largest(x.double()), weight.abs()) * FIXED
        else:  # there W is rounded to bfloat16
            error = F.linear(x.double().abs(), weight.abs()) * 2**-8.9
        assert ((y - exact).abs() <= exact.abs() * 2**-8 + error + 1e-6).all(), rows


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_extremes(format: FormatName) -> None:
    linear = nn.Linear(64, 16, bias=False)
    nn.init.zeros_(linear.weight)
    linear.weight.data[3, 32:] = 1e30
    layer = QuantizedLinear.of(linear.bfloat16(), format)
    x = torch.zeros(2, 64).bfloat16()
    x[1, 32:] = 1e-30
    with torch.no_grad():
        y = layer(x)
    assert y[0].tolist() == [0.0] * 16
    assert y[1].float().tolist() == pytest.approx([0.0] * 3 + [32.0] + [0.0] * 12, rel=0.01)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [2, 40])
def test_what_is_no_number_stays_so(special: float, rows: int) -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 20).bfloat16(), "int8")
    x = torch.ones(rows, 64).bfloat16()
    x[0, 3] = special
    with torch.no_grad():
        y = layer(x)
    assert y[0].isfinite().logical_not().all()
    assert y[1:].isfinite().all()


def test_compiler_traces_it() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 48).bfloat16(), "int4")
    x = torch.randn(2, 64).bfloat16()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


def test_refused() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 48, bias=False).bfloat16(), "int8")
    packed = (layer.codes, layer.scales, None, None)
    with pytest.raises(RuntimeError, match="x must be bfloat16"):
        native.packed_linear(torch.zeros(1, 64), *packed, out_features=48)
    with pytest.raises(RuntimeError, match="as wide as the groups"):
        native.packed_linear(torch.zeros(1, 32).bfloat16(), *packed, out_features=48)
    with pytest.raises(RuntimeError, match="codes has another"):
        native.packed_linear(torch.zeros(1, 64).bfloat16(), *packed, out_features=49)
