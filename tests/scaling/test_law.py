"""Fits to losses computed from a known law."""

import itertools
import json
import math
import random
from collections.abc import Callable

import pytest

from workhorse.errors import WorkhorseError
from workhorse.plan.subject import BESIROGLU, Parametric
from workhorse.scaling import FORMS, Law, Point, fit_law
from workhorse.scaling.laws import _described

SIZES = [(n, d) for n in (1e6, 4e6, 2e7, 1e8) for d in (2e7, 1e8, 1e9)]
HOFFMANN = [Point(n, d, BESIROGLU.loss(n, d)) for n, d in SIZES]


def kaplan(n: float, d: float) -> float:
    """2001.08361 eq. 1.5 with the constants of its table 2."""
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
    """The interval nearly always contains the loss of a larger run with the same noise."""
    draw, inside = random.Random(1), 0
    for _ in range(6):
        noisy = [p._replace(loss=p.loss * math.exp(draw.gauss(0, 0.005))) for p in HOFFMANN]
        found = fit_law(FORMS["hoffmann"], noisy, draws=30).predict(Point(4e8, 4e9))
        assert found.low < found.value < found.high < found.low * 1.15
        inside += (
            found.low <= BESIROGLU.loss(4e8, 4e9) * math.exp(draw.gauss(0, 0.005)) <= found.high
        )
    assert inside >= 4


def test_intervals_of_few_runs_hold_the_numbers():
    """Seven noisy runs hardly determine the limit of the loss; the interval must be wide enough."""
    of_law = Parametric(1.5, 80, 78, 0.35, 0.3)
    sizes = [(n, d) for n, d in itertools.product((5e4, 1e5, 3e5), (25e3, 8e4)) if n * d < 2e10]
    sizes += [(1e5, 2e5), (5e4, 2e5)]
    draw, inside = random.Random(1), 0
    for _ in range(6):
        points = [Point(*at, of_law.loss(*at) * math.exp(draw.gauss(0, 0.01))) for at in sizes]
        limit = fit_law(FORMS["hoffmann"], points, draws=20).constants()["E"]
        inside += limit.low <= of_law.e <= limit.high
    assert inside >= 5


def test_more_noise_gives_wider_intervals():
    widths = []
    for noise in (0.001, 0.01):
        draw = random.Random(2)
        noisy = [p._replace(loss=p.loss * math.exp(draw.gauss(0, noise))) for p in HOFFMANN]
        found = fit_law(FORMS["hoffmann"], noisy, draws=20).predict(Point(4e8, 4e9))
        widths.append(found.high - found.low)
    assert widths[1] > 4 * widths[0]


def test_too_few_runs():
    with pytest.raises(
        WorkhorseError, match=r"5 coefficients to fit: at least 7 runs are needed, 4 given"
    ):
        fit_law(FORMS["hoffmann"], HOFFMANN[:4])


@pytest.mark.parametrize("form", ["hoffmann", "kaplan", "compute"])
def test_runs_of_one_size_show_no_law(form: str):
    same = [Point(1e6, 2e7, 3 + seed / 100) for seed in range(8)]
    with pytest.raises(WorkhorseError, match=r"least . different numbers of (parameters|flops)"):
        fit_law(FORMS[form], same)


@pytest.mark.parametrize("form", ["hoffmann", "kaplan", "compute"])
@pytest.mark.parametrize("loss", [lambda n, d: 1.5 + n**0.05, lambda n, d: 4 + 1e-9 * math.sin(n)])
def test_runs_that_follow_no_law_give_finite_numbers(
    form: str, loss: Callable[[float, float], float]
):
    """Undetermined constants are very large or small, and the optimum is None."""
    points = [Point(n, d, loss(n, d)) for n, d in SIZES]
    described = _described(fit_law(FORMS[form], points, draws=3), [Point(1e12, 1e13)])
    assert json.loads(json.dumps(described, allow_nan=False)) == described


@pytest.mark.parametrize(
    "theta", [(0, -800, 0, 0.1, 0.1), (0, 0, -800, 0.1, 0.1), (0, 5, 0, 0.001, 0.001)]
)
def test_losses_that_one_size_does_not_lower_have_no_best_division(theta: tuple[float, ...]):
    law = Law(FORMS["hoffmann"], HOFFMANN, HOFFMANN[0], theta, 0.01, [(theta, 0.01)])
    assert _described(law, [])["optimum"] is None


def test_runs_on_one_ray_cannot_tell_parameters_from_tokens():
    """A compute-optimal ladder (20 tokens per parameter) cannot separate the two exponents."""
    ray = [Point(n, 2048 * round(20 * n / 2048)) for n in (1e6, 2e6, 4e6, 8e6, 1.6e7, 3.2e7, 6.4e7)]
    points = [point._replace(loss=BESIROGLU.loss(*point[:2])) for point in ray]
    for form in ("hoffmann", "kaplan"):
        with pytest.raises(WorkhorseError, match="tokens are nearly a power of the parameters, so"):
            fit_law(FORMS[form], points)
    law = fit_law(FORMS["compute"], points, draws=3)
    assert law.predict(Point(1.28e8, 2.56e9)).value == pytest.approx(
        BESIROGLU.loss(1.28e8, 2.56e9), rel=0.01
    )


def test_losses_that_are_all_equal_have_no_best_division():
    flat = [Point(n, d, 3.0) for n, d in SIZES]
    assert _described(fit_law(FORMS["hoffmann"], flat, draws=3), [])["optimum"] is None
