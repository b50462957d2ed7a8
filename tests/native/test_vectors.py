"""`Vectors.gemm` against float64, to the rounding of float32 sums."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.native.machine import VECTORS, needs_vectors
from workhorse.native import resolve

pytestmark = needs_vectors

SUM = 2e-6
"""As a share of the sum of magnitudes; 4,000 numbers in any order."""
EDGES = [1, 11, 12, 13, 31, 32, 33, 49]
LONG = [(40, 385, 40), (33, 2050, 700), (2100, 1000, 200), (600, 4100, 1100)]
"""(rows, inner, columns) of products that are cut into blocks, along each axis and all."""


def matrix(rows: int, columns: int, *, by_columns: bool = False) -> Tensor:
    return torch.randn(columns, rows).t() if by_columns else torch.randn(rows, columns)


def assert_right(a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    c = VECTORS.gemm(a, b, bias)
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        exact += bias.double()
    assert c.shape == exact.shape
    assert c.is_contiguous()
    assert ((c.double() - exact).abs() <= (magnitude + 1) * SUM).all()


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
def test_every_edge_in_every_order(b_by_columns: bool, a_by_columns: bool) -> None:
    for rows, inner, columns in itertools.product(EDGES, repeat=3):
        a = matrix(rows, inner, by_columns=a_by_columns)
        b = matrix(inner, columns, by_columns=b_by_columns)
        assert_right(a, b, torch.randn(columns) if rows % 2 else None)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("shape", LONG)
def test_long_sums(shape: tuple[int, int, int], by_columns: bool) -> None:
    rows, inner, columns = shape
    a = matrix(rows, inner, by_columns=by_columns)
    b = matrix(inner, columns, by_columns=not by_columns)
    assert_right(a, b, torch.randn(columns))


def test_rounding_depends_on_the_inner_size_alone() -> None:
    """Not on the rows and columns beside a number, the order in memory, or the threads."""
    a, b = torch.randn(700, 900), torch.randn(900, 600)
    whole, before = VECTORS.gemm(a, b), torch.get_num_threads()
    assert torch.equal(VECTORS.gemm(a[5:6], b), whole[5:6])
    assert torch.equal(VECTORS.gemm(a[:, :], b[:, 7:20]), whole[:, 7:20])
    assert torch.equal(VECTORS.gemm(a.t().contiguous().t(), b.t().contiguous().t()), whole)
    try:
        for threads in (1, 2, 3, 4, 6):
            torch.set_num_threads(threads)
            assert torch.equal(VECTORS.gemm(a, b), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("maker", ["GenuineIntel", "AuthenticAMD"])
def test_pytorchs_products_stay_where_they_are_as_quick(
    monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    monkeypatch.setattr("workhorse.instructions.told_of_cpu", lambda _: maker)
    assert (resolve("vectors", wait=True).vectors is None) == (maker == "GenuineIntel")


def test_rows_apart_and_expanded() -> None:
    wide = torch.randn(80, 200)
    assert_right(wide[:70, 3:67], wide[5:69, 1:42])
    assert_right(wide[:64, 7:77].t(), wide[3:43, 9:73].t())
    assert_right(torch.randn(1, 64).expand(40, 64), matrix(64, 40))


def test_nothing_to_multiply() -> None:
    assert VECTORS.gemm(matrix(0, 5), matrix(5, 3)).shape == (0, 3)
    assert VECTORS.gemm(matrix(2, 5), matrix(5, 0)).shape == (2, 0)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(special: float) -> None:
    a = torch.ones(20, 33)
    a[3, 32] = special
    c = VECTORS.gemm(a, torch.ones(33, 40))
    assert c[3].isfinite().logical_not().all()
    assert c[:3].isfinite().all()
    assert c[4:].isfinite().all()


@pytest.mark.parametrize(
    ("a", "b", "bias"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 5), None),
        (torch.zeros(2, 4).double(), torch.zeros(4, 3).double(), None),
        (torch.zeros(2, 4), torch.zeros(4, 3).bfloat16(), None),
        (torch.zeros(2, 4), torch.zeros(4), None),
        (torch.zeros(8, 8)[::2, ::2], torch.zeros(8, 8)[::2, ::2], None),
        (torch.zeros(2, 4), torch.zeros(4, 3), torch.zeros(2)),
        (torch.zeros(2, 4), torch.zeros(4, 3), torch.zeros(3).bfloat16()),
        (torch.zeros(2, 0), torch.zeros(0, 3), None),
    ],
    ids=["inner", "float64", "two types", "axes", "strides", "bias", "type of bias", "no sums"],
)
def test_refused(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match="workhorse: "):
        VECTORS.gemm(a, b, bias)
