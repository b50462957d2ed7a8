import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workhorse.data.sampling import MIXING_BLOCK, Mixture
from workhorse.errors import WorkhorseError


@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_shares_are_exact_to_one_row_in_every_block(weights: list[float], seed: int) -> None:
    mixture = Mixture([str(i) for i in range(len(weights))], weights, seed)
    for block in (0, 7):
        rows = np.arange(MIXING_BLOCK) + block * MIXING_BLOCK
        counts = np.bincount(mixture.locate(rows)[0], minlength=len(weights))
        shares = np.array(weights) / sum(weights) * MIXING_BLOCK
        assert (np.abs(counts - shares) < 1).all()


def test_no_source_skips_or_repeats_a_row_of_its_own() -> None:
    mixture = Mixture(["a", "b"], [3, 1], seed=5)
    sources, numbers = mixture.locate(np.arange(2 * MIXING_BLOCK))
    assert sorted(numbers[sources == 0]) == list(range(15_000))
    assert sorted(numbers[sources == 1]) == list(range(5_000))


def test_a_short_run_sees_the_sources_about_as_weighted() -> None:
    sources, _ = Mixture(["a", "b"], [3, 1], seed=5).locate(np.arange(1000))
    assert 200 < sources.sum() < 300


def test_a_weight_too_small_to_be_seen_is_refused() -> None:
    with pytest.raises(WorkhorseError, match="weight 1e-06 gives 'b' less than one row in 10,000"):
        Mixture(["a", "b"], [1, 1e-6], seed=0)
