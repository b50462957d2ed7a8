"""`MatrixUnit.gemm` against float64, to the rounding that float32 sums and the type allow."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.native.machine import MATRIX_UNIT, needs
from workhorse.native import matrix_unit, resolve

pytestmark = needs("matrix_unit")

NAN, INFINITY = float("nan"), float("inf")
LARGEST = torch.finfo(torch.float32).max
BOTH = [torch.bfloat16, torch.float32]
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-24}  # relative to the element
SUM = 2e-6  # of float32, relative to the sum of magnitudes; for 4,000 elements in any order
HALVES = 2**-15  # relative to the same; the largest error of float32 as the sum of two bfloat16
EDGES = [1, 15, 16, 17, 33, 64, 70]
LONG = [(40, 1537, 40), (33, 2050, 300), (64, 3000, 200), (300, 1600, 450), (600, 2048, 420)]
"""(rows, inner, columns) of matmuls that are cut: inner above `kWhole` in `ops/gemm/tiles.h`."""


def assert_exact(a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    c = MATRIX_UNIT.gemm(a, b, bias)
    exact = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs()
    if bias is not None:
        exact += bias.double()
    assert c.shape == exact.shape
    assert c.dtype == a.dtype
    assert c.is_contiguous()
    bound = exact.abs() * ROUNDING[a.dtype] + (magnitude + 1) * SUM
    if a.dtype == torch.float32:
        bound += magnitude * HALVES
    assert ((c.double() - exact).abs() <= bound).all()


def matrix(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, *, by_columns: bool = False
) -> Tensor:
    if by_columns:
        return torch.randn(columns, rows).to(dtype).t()
    return torch.randn(rows, columns).to(dtype)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
def test_every_edge_in_every_order(
    dtype: torch.dtype, b_by_columns: bool, a_by_columns: bool
) -> None:
    for rows, inner, columns in itertools.product(EDGES, repeat=3):
        a = matrix(rows, inner, dtype, by_columns=a_by_columns)
        b = matrix(inner, columns, dtype, by_columns=b_by_columns)
        assert_exact(a, b, torch.randn(columns).to(dtype) if rows % 2 else None)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("dtype", BOTH)
def test_long_sums(
    dtype: torch.dtype, shape: tuple[int, int, int], b_by_columns: bool, a_by_columns: bool
) -> None:
    rows, inner, columns = shape
    a = matrix(rows, inner, dtype, by_columns=a_by_columns)
    b = matrix(inner, columns, dtype, by_columns=b_by_columns)
    assert_exact(a, b, torch.randn(columns).to(dtype))


def test_float32_lies_between_its_own_products_and_those_of_tensorfloat32() -> None:
    """Errors relative to the sum of magnitudes for 1,536 elements.

    Measured: PyTorch 2⁻²³, ours 2⁻²⁰, bfloat16 2⁻¹⁰.
    """
    a, b = torch.randn(300, 1536), torch.randn(1536, 300)
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def error(c: Tensor) -> float:
        return float(((c.double() - exact).abs() / magnitude).max())

    assert error(MATRIX_UNIT.gemm(a, b)) < 2**-19
    # TensorFloat32 has 11 bits.
    eleven_bits = [(x.view(torch.int32) + 2**12 & -(2**13)).view(torch.float32) for x in (a, b)]
    assert error(MATRIX_UNIT.gemm(a, b)) < error(eleven_bits[0] @ eleven_bits[1]) / 32


def test_numbers_of_few_bits_are_multiplied_exactly() -> None:
    """Both parts of one operand count, and nothing is lost if the other has no lower part."""
    a = torch.randint(-(2**12), 2**12, (40, 70)).float()
    b = torch.randint(-(2**5), 2**5, (70, 50)).float()
    assert torch.equal(MATRIX_UNIT.gemm(a, b), a @ b)
    assert torch.equal(MATRIX_UNIT.gemm(b.t(), a.t()), b.t() @ a.t())


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dtype", BOTH)
def test_parts_of_threads_make_the_whole(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, columns in ((33, 1000), (1000, 33), (130, 130), (20, 20)):
            assert_exact(matrix(rows, 70, dtype), matrix(70, columns, dtype))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", BOTH)
def test_invariant_batch_and_expanded(dtype: torch.dtype) -> None:
    wide = torch.randn(80, 200).to(dtype)
    assert_exact(wide[:70, 3:67], wide[5:69, 1:42])
    assert_exact(wide[:64, 7:77].t(), wide[3:43, 9:73].t())
    assert_exact(torch.randn(1, 64).to(dtype).expand(40, 64), matrix(64, 40, dtype))


@pytest.mark.parametrize("dtype", BOTH)
def test_nothing_to_multiply(dtype: torch.dtype) -> None:
    assert MATRIX_UNIT.gemm(matrix(0, 5, dtype), matrix(5, 3, dtype)).shape == (0, 3)
    assert MATRIX_UNIT.gemm(matrix(2, 5, dtype), matrix(5, 0, dtype)).shape == (2, 0)


@pytest.mark.parametrize("special", [NAN, INFINITY])
@pytest.mark.parametrize("dtype", BOTH)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, special: float) -> None:
    a = torch.ones(20, 33, dtype=dtype)
    a[3, 32] = special
    c = MATRIX_UNIT.gemm(a, torch.ones(33, 40, dtype=dtype))
    assert c[3].isfinite().logical_not().all()
    assert c[:3].isfinite().all()
    assert c[4:].isfinite().all()


@pytest.mark.parametrize("by_columns", [False, True])
def test_infinite_and_large_float32_give_what_they_give_in_float32(by_columns: bool) -> None:
    """Infinity has no lower part, and the largest values round to infinity in bfloat16."""

    def alone(numbers: list[float]) -> Tensor:
        """A matrix with one of the values in each row, and zeros elsewhere."""
        rows = torch.zeros(len(numbers), 40)
        rows[:, 35] = torch.tensor(numbers)
        return rows.t().contiguous().t() if by_columns else rows

    infinite, large = [INFINITY, -INFINITY, NAN], [LARGEST, -LARGEST, 3.395e38]
    others = [0.0, 0.5, -0.5, 0.3, 1e-3, -1 / 3]  # no overflow by rounding
    for numbers, factors in ((infinite, [*others, 2.0, -1e5]), (large, others)):
        a, b = alone(numbers), alone(factors)
        for left, right in ((a, b.t()), (b, a.t())):
            torch.testing.assert_close(
                MATRIX_UNIT.gemm(left, right), left @ right, rtol=HALVES, atol=0, equal_nan=True
            )


def test_compiler_traces_it() -> None:
    a, b, bias = matrix(40, 32), matrix(32, 20), torch.randn(20).bfloat16()
    compiled = torch.compile(
        lambda a: MATRIX_UNIT.gemm(a, b, bias) * 2, backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(a), MATRIX_UNIT.gemm(a, b, bias) * 2)


@pytest.mark.parametrize(
    ("a", "b", "bias"),
    [
        (torch.zeros(2, 4).bfloat16(), torch.zeros(3, 5).bfloat16(), None),
        (torch.zeros(2, 4).double(), torch.zeros(4, 3).double(), None),
        (torch.zeros(2, 4), torch.zeros(4, 3).bfloat16(), None),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4).bfloat16(), None),
        (torch.zeros(8, 8)[::2, ::2].bfloat16(), torch.zeros(8, 8).bfloat16()[::2, ::2], None),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4, 3).bfloat16(), torch.zeros(2).bfloat16()),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(4, 3).bfloat16(), torch.zeros(3)),
        (torch.zeros(2, 0).bfloat16(), torch.zeros(0, 3).bfloat16(), None),
    ],
    ids=["inner", "float64", "two types", "axes", "strides", "bias", "type of bias", "no sums"],
)
def test_refused(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match="workhorse: "):
        MATRIX_UNIT.gemm(a, b, bias)


def test_a_cpu_without_the_unit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_unit, "cpu_has", lambda _: False)
    reasons = resolve("matrix_unit", wait=True).why_not
    assert reasons == {"matrix_unit": "the CPU has no matrix unit for bfloat16"}
