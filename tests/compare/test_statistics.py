"""The statistics, compared with SciPy's tests and with figures computed by hand."""

import math
import random
import sys

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from workhorse.compare.statistics import (
    detectable,
    holm,
    interval,
    paired,
    power,
    scipy_stats,
    seeds_for,
)
from workhorse.errors import WorkhorseError

LOSSES = [1.52, 1.61, 1.49, 1.58, 1.55]
OTHERS = [1.50, 1.55, 1.48, 1.57, 1.51]


def test_an_interval_by_hand():
    """Values 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.3027 from tables, so 2 ± 4.3027 / √3."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.high - found.mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_an_interval_is_scipys():
    low, high = scipy.stats.t.interval(
        0.95, len(LOSSES) - 1, loc=np.mean(LOSSES), scale=scipy.stats.sem(LOSSES)
    )
    found = interval(LOSSES)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_a_paired_test_is_scipys():
    theirs = scipy.stats.ttest_rel(LOSSES, OTHERS)
    found = paired(LOSSES, OTHERS)
    assert found.p == pytest.approx(theirs.pvalue)
    span = theirs.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((span.low, span.high))
    assert found.mean == pytest.approx(0.028)


def test_pairing_takes_out_what_seeds_have_in_common():
    _, apart = scipy.stats.ttest_ind(LOSSES, OTHERS)
    assert paired(LOSSES, OTHERS).p < 0.05 < apart


def test_differences_without_spread():
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1


def test_holm_by_hand():
    """Corrected: 0.01 · 4, 0.02 · 3, max(0.03 · 2, previous), max(0.04 · 1, previous)."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_keeps_the_order_and_never_helps(ps: list[float]):
    corrected = holm(ps)
    assert all(0 <= p <= new <= 1 for p, new in zip(ps, corrected, strict=True))
    assert [corrected[i] for i in np.argsort(ps, kind="stable")] == sorted(corrected)


@pytest.mark.parametrize(("n", "effect"), [(2, 8.0), (3, 2.0), (5, 1.5), (10, 0.7), (30, 0.3)])
def test_power_is_that_of_the_noncentral_t(n: int, effect: float):
    limit = scipy.stats.t.ppf(0.975, n - 1)
    shift = effect * math.sqrt(n)
    theirs = scipy.stats.nct.sf(limit, n - 1, shift)  # the other tail is negligible
    assert power(effect, 1.0, n) == pytest.approx(theirs, abs=2e-3)


def test_power_is_the_share_of_simulated_studies_that_show_the_difference():
    numbers = random.Random(0)
    shown = sum(
        paired([numbers.gauss(1.2, 1.0) for _ in range(6)], [0.0] * 6).p < 0.05 for _ in range(1000)
    )
    assert power(1.2, 1.0, 6) == pytest.approx(shown / 1000, abs=0.04)


def test_without_a_difference_power_is_the_rate_of_false_alarms():
    assert power(0.0, 1.0, 5) == pytest.approx(0.05, abs=1e-4)
    assert power(0.0, 1.0, 5, level=0.01) == pytest.approx(0.01, abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_what_is_detectable_is_seen_four_times_in_five(n: int):
    effect = detectable(0.3, n)
    assert power(effect, 0.3, n) == pytest.approx(0.8, abs=1e-4)
    assert detectable(0.6, n) == pytest.approx(2 * effect, rel=1e-4)
    assert detectable(0.3, n, level=0.01) > effect


def test_the_seeds_that_an_effect_needs():
    """A textbook example: a paired t-test detects half a deviation with 34 pairs, not with 33."""
    assert seeds_for(0.5, 1.0) == 34
    assert seeds_for(0.001, 1.0) is None
    assert seeds_for(0.001, 0.0) == 2


def test_without_scipy_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(WorkhorseError, match=r"pip install -e '.\[compare\]'"):
        scipy_stats()
