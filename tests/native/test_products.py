"""`products.multiply` against float64, to the rounding that float32 sums and bfloat16 allow."""

import itertools

import pytest
import torch
from torch import Tensor

from workhorse.native import products

pytestmark = pytest.mark.usefixtures("multiply")

HALF_A_STEP = 2**-8  # of bfloat16, as a share of the number
SUM = 2e-6  # of float32, as a share of the sum of magnitudes; 4,000 numbers in any order
EDGES = [1, 15, 16, 17, 33, 64, 70]
LONG = [(40, 1537, 40), (33, 2050, 300), (64, 3000, 200), (300, 1600, 450), (600, 2048, 420)]
"""(rows, inner, columns) of products that are cut: inner above `kWhole` in `products.h`."""


@pytest.fixture(scope="session")
def multiply() -> None:
    if reason := products.why_not(wait=True):
        pytest.skip(reason)


def assert_exact(a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    c = products.multiply(a, b, bias)
    exact = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs() + 1
    if bias is not None:
        exact += bias.double()
    assert c.shape == exact.shape
    assert c.is_contiguous()
    assert ((c.double() - exact).abs() <= exact.abs() * HALF_A_STEP + magnitude * SUM).all()


def matrix(rows: int, columns: int, *, by_columns: bool = False) -> Tensor:
    if by_columns:
        return torch.randn(columns, rows).bfloat16().t()
    return torch.randn(rows, columns).bfloat16()


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
def test_every_edge_in_every_order(a_by_columns: bool, b_by_columns: bool) -> None:
    for rows, inner, columns in itertools.product(EDGES, repeat=3):
        a = matrix(rows, inner, by_columns=a_by_columns)
        b = matrix(inner, columns, by_columns=b_by_columns)
        assert_exact(a, b, torch.randn(columns).bfloat16() if rows % 2 else None)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("shape", LONG)
def test_long_sums(shape: tuple[int, int, int], a_by_columns: bool, b_by_columns: bool) -> None:
    rows, inner, columns = shape
    a = matrix(rows, inner, by_columns=a_by_columns)
    b = matrix(inner, columns, by_columns=b_by_columns)
    assert_exact(a, b, torch.randn(columns).bfloat16())


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
def test_parts_of_threads_make_the_whole(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, columns in ((33, 1000), (1000, 33), (130, 130), (20, 20)):
            assert_exact(matrix(rows, 70), matrix(70, columns))
    finally:
        torch.set_num_threads(before)


def test_rows_apart_and_expanded() -> None:
    wide = torch.randn(80, 200).bfloat16()
    assert_exact(wide[:70, 3:67], wide[5:69, 1:42])
    assert_exact(wide[:64, 7:77].t(), wide[3:43, 9:73].t())
    assert_exact(torch.randn(1, 64).bfloat16().expand(40, 64), matrix(64, 40))


def test_nothing_to_multiply() -> None:
    assert products.multiply(matrix(0, 5), matrix(5, 3)).shape == (0, 3)
    assert products.multiply(matrix(2, 5), matrix(5, 0)).shape == (2, 0)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(special: float) -> None:
    a = torch.ones(20, 33).bfloat16()
    a[3, 32] = special
    c = products.multiply(a, torch.ones(33, 40).bfloat16())
    assert c[3].isfinite().logical_not().all()
    assert c[:3].isfinite().all()
    assert c[4:].isfinite().all()


def test_compiler_traces_it() -> None:
    a, b, bias = matrix(40, 32), matrix(32, 20), torch.randn(20).bfloat16()
    compiled = torch.compile(
        lambda a: products.multiply(a, b, bias) * 2, backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(a), products.multiply(a, b, bias) * 2)
    torch.library.opcheck(
        torch.ops.workhorse.multiply.default, (a, b, bias), test_utils="test_faketensor"
    )


@pytest.mark.parametrize(
    ("a", "b", "bias"),
    [
        (torch.zeros(2, 4).bfloat16(), torch.zeros(3, 5).bfloat16(), None),
        (torch.zeros(2, 4), torch.zeros(4, 3), None),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4).bfloat16(), None),
        (torch.zeros(8, 8)[::2, ::2].bfloat16(), torch.zeros(8, 8).bfloat16()[::2, ::2], None),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4, 3).bfloat16(), torch.zeros(2).bfloat16()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4, 3).bfloat16(), torch.zeros(3)),
        (torch.zeros(2, 0).bfloat16(), torch.zeros(0, 3).bfloat16(), None),
    ],
    ids=["inner", "float32", "axes", "strides", "bias", "type of bias", "no sums"],
)
def test_refused(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match="workhorse: "):
        products.multiply(a, b, bias)


def test_a_cpu_without_the_unit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_has", lambda _: False)
    assert products.why_not(wait=True) == "the CPU has no matrix unit for bfloat16"
