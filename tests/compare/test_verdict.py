import pytest

from workhorse.compare.statistics import paired, verdict

BASE = [2.000, 2.010, 1.990, 2.005]


def judged(losses, *, tests=1, p=None, **options):
    found = paired(losses, BASE)
    corrected = found.p if p is None else p
    return verdict("a", "b", found, corrected, n=4, tests=tests, unit="nats", **options)


BETTER = [1.970, 1.985, 1.962, 1.976]


def test_a_difference_that_is_shown_is_given_with_its_interval():
    said = judged(BETTER)
    assert said.outcome == "better"
    assert said.words == "a is better than b by 0.025 to 0.031 nats"


def test_a_worse_one_is_called_worse():
    said = judged([loss + 0.02 + place / 1000 for place, loss in enumerate(BASE)])
    assert said.outcome == "worse"
    assert said.words.startswith("a is worse than b by 0.019 to 0.024")


def test_without_a_difference_it_says_what_could_have_been_seen():
    said = judged([2.010, 2.000, 2.000, 1.990])
    assert said.outcome == "not shown"
    assert said.words == (
        "no significant difference between a and b; this study can detect "
        f"{said.detectable:.2g} nats or more (80 % power)"
    )
    assert said.detectable > 0.01


def test_a_difference_lost_to_the_number_of_comparisons_is_told():
    said = judged(BETTER, tests=30, p=0.07)
    assert said.outcome == "not shown"
    assert ", not among 30 comparisons" in said.words


def test_the_smallest_effect_that_matters():
    assert "more than the smallest effect of 0.01" in judged(BETTER, smallest_effect=0.01).words
    assert "less than the smallest effect of 0.1" in judged(BETTER, smallest_effect=0.1).words
    assert (
        "this may be above or below the smallest effect of 0.028"
        in judged(BETTER, smallest_effect=0.028).words
    )
    close = [loss + change for loss, change in zip(BASE, (1e-3, -1e-3, 2e-3, -1e-3), strict=True)]
    said = judged(close, smallest_effect=0.05)
    assert said.outcome == "equal"
    assert "are equivalent within 0.05 nats, the smallest effect that matters" in said.words


def test_a_study_too_small_says_how_many_seeds_it_would_take():
    said = judged([2.010, 2.000, 2.000, 1.990], smallest_effect=0.005)
    assert said.outcome == "not shown"
    assert "detecting 0.005 needs about" in said.words


@pytest.mark.parametrize("tests", [1, 4])
def test_more_comparisons_see_less(tests: int):
    losses = [2.010, 2.000, 2.000, 1.990]
    assert judged(losses, tests=tests + 1).detectable > judged(losses, tests=tests).detectable
