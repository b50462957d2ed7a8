"""A law fitted to runs, how sure it is, and what it predicts.

The fit is the one of 2203.15556 appendix D.3: the logarithm of the loss, Huber's measure of the
error, from several starts. How sure it is comes from fitting it again to losses drawn anew around
the law (a parametric bootstrap). The runs are few, so each draw has an error of its own size, as
Student's t has it for what is left of n runs after p numbers are fitted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from workhorse.errors import WorkhorseError
from workhorse.scaling.forms import Form, Logs, Point, Theta

HUBER = 1e-3
"""Errors of the logarithm beyond which they count linearly (2203.15556 appendix D.3)."""
DRAWS = 200
SEED = 0
MOST_STEPS, MOST_AGAIN = 300, 30
"""Of a fit from afar, and of one from the numbers of the first; losses that no law fits would take
thousands."""
LOW, HIGH = 0.025, 0.975
SLOWEST, STEEPEST = 1e-3, 3.0
"""The exponents that a fit may come to."""


class Prediction(NamedTuple):
    """Of a run's loss, with the interval that holds it in 95 % of such cases, if the form holds."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        form: up to its numbers.
        points: that it was fitted to.
        middle: amid them.
        theta: its numbers.
        error: standard deviation of the logarithm of a loss around it, also of further runs.
        others: the numbers of the fits to losses drawn anew, and the error of each draw.
    """

    form: Form
    points: Sequence[Point]
    middle: Point
    theta: Theta
    error: float
    others: Sequence[tuple[Theta, float]] = field(repr=False)

    def predict(self, point: Point) -> Prediction:
        """The loss of a further run."""
        draw, place = np.random.default_rng(SEED), _beside([point], self.middle)
        drawn = [
            self.form.log_loss(theta, *place)[0] + draw.normal(0, error)
            for theta, error in self.others
        ]
        logs = (self.form.log_loss(self.theta, *place)[0], *np.quantile(drawn, (LOW, HIGH)))
        return Prediction(*(math.exp(log) for log in logs))

    def constants(self) -> dict[str, Prediction]:
        """The numbers as the paper has them, each with its interval."""
        every = [self.form.constants(theta, self.middle) for theta, _ in self.others]
        found: dict[str, Prediction] = {}
        for name, value in self.form.constants(self.theta, self.middle).items():
            low, high = np.quantile([constants[name] for constants in every], (LOW, HIGH))
            found[name] = Prediction(value, float(low), float(high))
        return found


def fit_law(form: Form, points: Sequence[Point], draws: int = DRAWS) -> Law:
    """A form's law of some runs.

    Args:
        form: one of `FORMS`.
        points: two more than the form has numbers, at least.
        draws: how many times losses are drawn anew.

    Raises:
        WorkhorseError: there are too few points, or SciPy is missing.
    """
    if len(points) < form.free + 2:
        raise WorkhorseError(
            f"{len(points)} runs are too few for {form.written}, which has {form.free} numbers; "
            f"give at least {form.free + 2}"
        )
    middle = Point(
        math.exp(fmean(math.log(point.parameters) for point in points)),
        math.exp(fmean(math.log(point.tokens) for point in points)),
    )
    place = _beside(points, middle)
    measured = np.log([point.loss for point in points])
    theta = _fitted(form, place, measured, form.starts(points), MOST_STEPS)
    fitted = form.log_loss(theta, *place)
    left = len(points) - form.free
    error = math.sqrt(((measured - fitted) ** 2).sum() / left)
    draw, others = np.random.default_rng(SEED), []
    for _ in range(draws):
        size = error * math.sqrt(left / draw.chisquare(left))
        drawn = fitted + draw.normal(0, size, len(points))
        others.append((_fitted(form, place, drawn, [theta], MOST_AGAIN), size))
    return Law(form, points, middle, theta, error, others)


def _beside(points: Sequence[Point], middle: Point) -> tuple[Logs, Logs]:
    """Logarithms of parameters and tokens, less those of the middle."""
    n = np.log([point.parameters / middle.parameters for point in points])
    return n, np.log([point.tokens / middle.tokens for point in points])


def _fitted(
    form: Form, place: tuple[Logs, Logs], measured: Logs, starts: Iterable[Theta], most: int
) -> Theta:
    """The numbers of the least error of the logarithm, after `most` evaluations at most."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise WorkhorseError(
            "laws are fitted by SciPy, which is not installed; pip install 'workhorse[compare]'"
        ) from None

    def errors(theta: Theta) -> Logs:
        return measured - form.log_loss(theta, *place)

    exponents = 2 if form.free > 3 else 1  # noqa: PLR2004 (the last one or two numbers)
    coefficients = form.free - exponents
    low = [-math.inf] * coefficients + [SLOWEST] * exponents
    high = [math.inf] * coefficients + [STEEPEST] * exponents
    ends: list[Any] = [
        least_squares(
            errors,
            list(start),
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER,
            max_nfev=most,
        )
        for start in starts
    ]
    return tuple(float(value) for value in min(ends, key=lambda end: end.cost).x)
