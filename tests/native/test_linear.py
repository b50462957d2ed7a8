"""`Decoding.linear` against float64, to the rounding that float32 sums and the type of y allow."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.native.machine import DECODING, MATRIX_UNIT, needs

pytestmark = needs("decoding")

HALF_A_STEP = {torch.bfloat16: 2**-8, torch.float32: 2**-24}
SUM = 2e-6  # of float32, relative to the sum of magnitudes; for 5,000 elements in any order
SHAPES = [(64, 64), (37, 50), (16, 33), (1, 1), (130, 768), (48, 2048), (9, 5000)]  # out, in
ROWS = [1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 70]


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs()) + 1
    bound = exact.abs() * HALF_A_STEP[y.dtype] + magnitude * SUM
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_product(dtype: torch.dtype, out: int, width: int) -> None:
    weight = torch.randn(out, width).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, width).to(dtype)
        for bias in (None, torch.randn(out).to(dtype)):
            assert_close(DECODING.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [50, 768, 5000])
def test_a_row_is_rounded_alike_beside_any_others(dtype: torch.dtype, width: int) -> None:
    weight, bias = torch.randn(37, width).to(dtype), torch.randn(37).to(dtype)
    x = torch.randn(70, width).to(dtype)
    y = DECODING.linear(x, weight, bias)
    for first, last in ((0, 2), (1, 4), (3, 10), (60, 70)):
        assert torch.equal(DECODING.linear(x[first:last], weight, bias), y[first:last])


@pytest.mark.skipif(MATRIX_UNIT is not None, reason="the unit multiplies several rows its own way")
@pytest.mark.parametrize("width", [33, 64, 80])
def test_so_it_is_if_numbers_are_subnormal(width: int) -> None:
    """A bfloat16 instruction flushes them to 0, so all rows must do the same."""
    weight = (2.0**-127 * torch.randn(19, width)).bfloat16()
    x = (2.0**120 * torch.randn(5, width)).bfloat16()
    y = DECODING.linear(x, weight, None)
    for row in range(5):
        assert torch.equal(DECODING.linear(x[row : row + 1], weight, None), y[row : row + 1])
    again = torch.tensor(2.0**-120) * torch.tensor(2.0**-20)
    assert again > 0  # subnormal, but not flushed here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_several_weights_at_once_are_each_of_them(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 96).to(dtype)
    weights = [torch.randn(out, 96).to(dtype) for out in (32, 1, 150, 37)]
    biases = [None, torch.randn(1).to(dtype), None, torch.randn(37).to(dtype)]
    found = DECODING.linear_each(x, weights, biases)
    for y, weight, bias in zip(found, weights, biases, strict=True):
        assert torch.equal(y, DECODING.linear(x, weight, bias))


def test_each_weight_must_fit_and_have_a_bias_or_none() -> None:
    x, fits = torch.zeros(2, 4), torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="weight is not a contiguous CPU tensor"):
        DECODING.linear_each(x, [fits, torch.zeros(3, 5)], [None, None])
    with pytest.raises(RuntimeError, match="weights and biases differ in number"):
        DECODING.linear_each(x, [fits, fits], [None])


def test_leading_axes_and_strides() -> None:
    weight = torch.randn(40, 32).bfloat16()
    x = torch.randn(32, 3, 5).bfloat16().permute(1, 2, 0)
    assert not x.is_contiguous()
    assert_close(DECODING.linear(x, weight), x, weight, None)
    assert DECODING.linear(x[:0], weight).shape == (0, 5, 40)
    assert DECODING.linear(x[0, 0], weight).shape == (40,)


def test_no_columns_give_the_bias() -> None:
    bias = torch.randn(3)
    assert (
        DECODING.linear(torch.zeros(2, 0), torch.zeros(3, 0), bias).tolist() == [bias.tolist()] * 2
    )


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_no_number_stays_so(special: float, rows: int) -> None:
    x = torch.ones(rows, 32).bfloat16()
    x[0, 3] = special
    y = DECODING.linear(x, torch.ones(20, 32).bfloat16())
    assert y[0].isfinite().logical_not().all()
    assert y[1:].isfinite().all()


def test_compiler_traces_it() -> None:
    weight = torch.randn(40, 32).bfloat16()
    x = torch.randn(2, 32).bfloat16()
    compiled = torch.compile(
        lambda x: DECODING.linear(x, weight) * 2, backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x), DECODING.linear(x, weight) * 2)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 5), None),
        (torch.zeros(2, 4), torch.zeros(3, 4).bfloat16(), None),
        (torch.zeros(2, 4), torch.zeros(4, 3).T, None),
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2)),
        (torch.zeros(2, 4).double(), torch.zeros(3, 4).double(), None),
        (torch.zeros(()), torch.zeros(3, 4), None),
    ],
    ids=["width", "type", "strides", "bias", "float64", "no axis"],
)
def test_refused(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match="workhorse: "):
        DECODING.linear(x, weight, bias)
