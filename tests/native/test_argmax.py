"""`Decoding.argmax` against PyTorch's argmax."""

import pytest
import torch

from tests.native.machine import DECODING, needs

pytestmark = needs("decoding")
TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 15), (3, 16), (2, 33), (5, 1000), (40, 4099)])
def test_it_finds_the_largest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = (torch.randn(shape) * 5).to(dtype)
    found = DECODING.argmax(logits)
    assert found.dtype == torch.int64
    assert torch.equal(logits.gather(1, found[:, None])[:, 0], logits.amax(dim=1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_first_of_equals_wins(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0, [49, 37, 21]] = 2  # 21 and 37 are in the same lane of a vector, 49 in none
    logits[1] = -3
    logits[2, [18, 17]] = 1
    assert DECODING.argmax(logits).tolist() == [21, 0, 17]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("place", [0, 31, 47, 49])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_has_none(
    value: float, place: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 50).to(dtype)
    logits[1, place] = value
    assert (DECODING.argmax(logits) < 0).tolist() == [False, True, False]


def test_part_of_each_row_is_looked_at() -> None:
    logits = torch.arange(60.0).view(2, 30)
    assert DECODING.argmax(logits[:, :20]).tolist() == [19, 19]


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(5),
        torch.zeros(2, 0),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(4, 8)[:, ::2],
    ],
    ids=["one axis", "no logits", "whole numbers", "not side by side"],
)
def test_what_does_not_fit_is_refused(logits: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="workhorse: "):
        DECODING.argmax(logits)
