import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workhorse.data.sampling import derive, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_index_comes_exactly_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_an_index_alone_goes_where_it_goes_among_others(
    size: int, key: int, data: st.DataObject
) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permute(indices, size, key)
    assert ((together >= 0) & (together < size)).all()
    assert together.tolist() == [
        permute(indices[i : i + 1], size, key)[0] for i in range(len(indices))
    ]


@pytest.mark.parametrize("size", [2, 3, 7, 300])
def test_every_place_is_about_equally_likely_over_keys(size: int) -> None:
    draws = 1000
    counts = np.zeros((size, size))
    for trial in range(draws):
        counts[np.arange(size), permute(np.arange(size), size, derive(trial, "test"))] += 1
    expected = draws / size
    freedom = (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_the_order_never_changes_between_versions() -> None:
    """A run that is resumed with a later version must get the same rows."""
    key = derive(1, "order", 0)
    assert permute(np.arange(10), 10, key).tolist() == [0, 3, 8, 2, 6, 9, 4, 5, 1, 7]
    assert permute(np.arange(290, 300), 300, key).tolist() == [
        160,
        221,
        88,
        271,
        112,
        76,
        135,
        93,
        26,
        281,
    ]


def test_neighbours_are_torn_apart() -> None:
    order = permute(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).mean() < 0.01
