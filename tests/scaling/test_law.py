"""Fits of losses whose law is known."""

import math
import random

import pytest

from workhorse.errors import WorkhorseError
from workhorse.plan.compute_optimal import BESIROGLU
from workhorse.scaling import FORMS, Point, fit_law

SIZES = [(n, d) for n in (1e6, 4e6, 2e7, 1e8) for d in (2e7, 1e8, 1e9)]
HOFFMANN = [Point(n, d, BESIROGLU.loss(n, d)) for n, d in SIZES]


def kaplan(n: float, d: float) -> float:
    """2001.08361 eq. 1.5 with the numbers of its table 2."""
    return ((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103


def test_the_numbers_of_hoffmanns_law_are_found_again():
    law = fit_law(FORMS["hoffmann"], HOFFMANN, draws=3)
    found = [constant.value for constant in law.constants().values()]
    assert found == pytest.approx(list(BESIROGLU), rel=1e-3)
    beyond = Point(1e10, 1e11)
    assert law.predict(beyond).value == pytest.approx(BESIROGLU.loss(1e10, 1e11), rel=1e-5)


def test_the_numbers_of_kaplans_law_are_found_again():
    law = fit_law(FORMS["kaplan"], [Point(n, d, kaplan(n, d)) for n, d in SIZES], draws=3)
    found = {name: constant.value for name, constant in law.constants().items()}
    expected = {"Nc": 6.4e13, "Dc": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103}
    assert found == pytest.approx(expected, rel=1e-3)


def test_the_numbers_of_a_law_of_compute_are_found_again():
    points = [Point(n, 20 * n, 2 + 300 / (120 * n * n) ** 0.15) for n in (1e6, 4e6, 2e7, 1e8, 1e9)]
    law = fit_law(FORMS["compute"], points, draws=3)
    found = {name: constant.value for name, constant in law.constants().items()}
    assert found == pytest.approx({"E": 2, "c": 300, "gamma": 0.15}, rel=1e-2)


def test_intervals_hold_what_they_predict():
    """Of noisy runs, the loss of a larger one, itself as noisy, lies inside nearly always."""
    draw, inside = random.Random(1), 0
    for _ in range(6):
        noisy = [p._replace(loss=p.loss * math.exp(draw.gauss(0, 0.005))) for p in HOFFMANN]
        found = fit_law(FORMS["hoffmann"], noisy, draws=30).predict(Point(4e8, 4e9))
        assert found.low < found.value < found.high < found.low * 1.15
        inside += (
            found.low <= BESIROGLU.loss(4e8, 4e9) * math.exp(draw.gauss(0, 0.005)) <= found.high
        )
    assert inside >= 4


def test_more_noise_gives_wider_intervals():
    widths = []
    for noise in (0.001, 0.01):
        draw = random.Random(2)
        noisy = [p._replace(loss=p.loss * math.exp(draw.gauss(0, noise))) for p in HOFFMANN]
        found = fit_law(FORMS["hoffmann"], noisy, draws=20).predict(Point(4e8, 4e9))
        widths.append(found.high - found.low)
    assert widths[1] > 4 * widths[0]


def test_too_few_runs():
    with pytest.raises(WorkhorseError, match=r"5 numbers to find: 7 runs are the fewest, 4 given"):
        fit_law(FORMS["hoffmann"], HOFFMANN[:4])


@pytest.mark.parametrize("form", ["hoffmann", "kaplan", "compute"])
def test_runs_of_one_size_show_no_law(form: str):
    same = [Point(1e6, 2e7, 3 + seed / 100) for seed in range(8)]
    with pytest.raises(WorkhorseError, match=r"different (parameters|flops) are the fewest"):
        fit_law(FORMS[form], same)
