"""`Vectors.gemm` and `gemms` against float64, to the rounding of float32 sums and of the result."""

import itertools
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

from tests.native.machine import VECTORS, needs
from workhorse.native.vectors import Sum

pytestmark = needs("vectors")
FIRST = """
import sys, torch
from workhorse.native import matrix_unit, vectors
a, b = torch.ones(256, 64).bfloat16(), torch.ones(64, 256).bfloat16()
load = vectors.load if sys.argv[1] == "vectors" else matrix_unit.load
product = load(wait=True).gemm(a, b)
assert torch.equal(product, torch.full((256, 256), 64.0).bfloat16()), product
"""

SUM = 2e-6
"""Relative to the sum of magnitudes; for 4,000 elements in any order."""
RESULT = {torch.float32: 2**-24, torch.bfloat16: 2**-8}
"""Relative to the element."""
DTYPES = [torch.bfloat16, torch.float32]
EDGES = [1, 5, 6, 11, 12, 13, 16, 31, 32, 33, 49]
LONG = [(40, 385, 40), (33, 2050, 700), (2100, 1000, 200), (600, 4100, 1100)]
"""(rows, inner, columns) of matmuls that are cut into blocks along one axis, or along all."""


def matrix(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, *, by_columns: bool = False
) -> Tensor:
    made = torch.randn(columns, rows).t() if by_columns else torch.randn(rows, columns)
    return made.to(dtype)


def assert_right(a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    assert_sum(VECTORS.gemm(a, b, bias), Sum([(a, b)], bias))


def assert_sum(c: Tensor, of: Sum) -> None:
    pairs = [(a.double(), b.double()) for a, b in of.pairs]
    exact = sum(a @ b for a, b in pairs) + (0 if of.bias is None else of.bias.double())
    magnitude = sum(a.abs() @ b.abs() for a, b in pairs)
    assert c.shape == exact.shape
    assert c.is_contiguous()
    assert c.dtype == of.pairs[0][0].dtype
    allowed = (magnitude + 1) * SUM + exact.abs() * RESULT[c.dtype]
    assert ((c.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
def test_every_edge_in_every_order(
    b_by_columns: bool, a_by_columns: bool, dtype: torch.dtype
) -> None:
    for rows, inner, columns in itertools.product(EDGES, repeat=3):
        a = matrix(rows, inner, dtype, by_columns=a_by_columns)
        b = matrix(inner, columns, dtype, by_columns=b_by_columns)
        assert_right(a, b, torch.randn(columns).to(dtype) if rows % 2 else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("shape", LONG)
def test_long_sums(shape: tuple[int, int, int], by_columns: bool, dtype: torch.dtype) -> None:
    rows, inner, columns = shape
    a = matrix(rows, inner, dtype, by_columns=by_columns)
    b = matrix(inner, columns, dtype, by_columns=not by_columns)
    assert_right(a, b, torch.randn(columns).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_sums_in_one_go(dtype: torch.dtype) -> None:
    def pair(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor]:
        return matrix(rows, inner, dtype), matrix(inner, columns, dtype, by_columns=True)

    sums = [
        Sum([pair(37, 50, 40), pair(37, 801, 40), pair(37, 1, 40)], torch.randn(40).to(dtype)),
        Sum([pair(5, 16, 100)]),
        Sum([pair(64, 900, 33), pair(64, 33, 33)]),
    ]
    made = VECTORS.gemms(sums)
    for c, of in zip(made, sums, strict=True):
        assert_sum(c, of)
    assert torch.equal(made[1], VECTORS.gemm(*sums[1].pairs[0]))


def test_sums_that_do_not_match_are_refused() -> None:
    one, other = (matrix(3, 4), matrix(4, 5)), (matrix(2, 4), matrix(4, 5))
    with pytest.raises(RuntimeError, match="workhorse: matmuls that are added"):
        VECTORS.gemms([Sum([one, other])])
    with pytest.raises(RuntimeError, match="workhorse: "):
        torch.ops.workhorse.products([one[0]], [one[1]], [1], [None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_depends_on_the_inner_size_alone(dtype: torch.dtype) -> None:
    """It does not depend on other rows and columns, the order in memory, or the threads."""
    a, b = matrix(700, 900, dtype), matrix(900, 600, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("inner", "columns"), [(64, 61), (770, 61), (2048, 150), (5632, 12), (1537, 300)]
)
def test_few_rows_have_the_bits_of_many(
    inner: int, columns: int, biased: bool, dtype: torch.dtype
) -> None:
    """Few rows read the weight in place; many rows pack it."""
    a, weight = matrix(300, inner, dtype), matrix(columns, inner, dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    many = VECTORS.linear(a, weight, bias)
    for rows in (1, 31, 32, 33, 100, 256, 257):
        assert torch.equal(VECTORS.linear(a[:rows].clone(), weight, bias), many[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_take_no_longer_than_as_many_of_many(dtype: torch.dtype) -> None:
    """Measured 0.9 to 1.1 on every instruction set; 2.9 if the compiler keeps sums in memory."""
    weight = torch.randn(768, 768, dtype=dtype)
    few, many = torch.randn(128, 768, dtype=dtype), torch.randn(512, 768, dtype=dtype)
    seconds: dict[int, list[float]] = {len(few): [], len(many): []}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for x in [few, many] * 20:
            begin = time.perf_counter()
            VECTORS.linear(x, weight, None)
            seconds[len(x)].append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    assert min(seconds[len(few)]) / len(few) <= 2 * min(seconds[len(many)]) / len(many)


def test_invariant_batch_and_expanded() -> None:
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


@pytest.mark.parametrize(
    "library", ["vectors", pytest.param("matrix unit", marks=needs("matrix_unit"))]
)
def test_the_first_product_of_a_process_is_whole(library: str) -> None:
    """The threads are new, and do not know their number yet."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FIRST, library]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
