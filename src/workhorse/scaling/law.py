"""A law fitted to runs: its form, its uncertainty, and what it predicts.

Sizes enter as logarithms, less those of the middle: the geometric mean of the runs. There the
coefficients are as large as losses, which keeps the fit well conditioned.

The fit is the one of 2203.15556 appendix D.3: the logarithm of the loss, Huber's measure of the
error, from several starts. How sure it is comes from fitting it again to losses drawn anew around
the law (a parametric bootstrap). The runs are few, so each draw has an error of its own size: the
loss of a further run is then distributed as Student's t, with n - p degrees of freedom for n runs
and p fitted numbers.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workhorse.errors import WorkhorseError, to_install
from workhorse.models.describe import FLOPS_PER_PARAMETER

Theta = Sequence[float]
"""The numbers of a law that are fitted, in the order of its form."""
Logs = NDArray[np.float64]
"""An array of logarithms, one for each run."""
LARGEST = math.log(sys.float_info.max)


class Point(NamedTuple):
    """A run that has ended, or one to predict."""

    parameters: float
    """Training FLOPs of a token over `FLOPS_PER_PARAMETER`: what multiplies, attention included."""
    tokens: float
    """Trained on."""
    loss: float = math.nan
    """Held-out, in nats per token."""
    name: str = ""

    @property
    def flops(self) -> float:
        """Of the whole training."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


class Form(Protocol):
    """A law whose numbers are still to be fitted."""

    name: str
    """With its source."""
    written: str
    """As people write it."""
    free: int
    """How many numbers are fitted."""
    exponents: int
    """How many of them, the last ones, are exponents."""
    sizes: Mapping[str, int]
    """How many different values of a quantity it takes to tell these numbers apart, at least."""

    def log_loss(self, theta: Theta, n: Logs, d: Logs) -> Logs:
        """The logarithm of the loss.

        Args:
            theta: the law's numbers, or arrays that broadcast with n and d.
            n: logarithms of the parameters, less that of the middle.
            d: likewise, of the tokens.
        """
        ...

    def starts(self, points: Sequence[Point]) -> Iterator[Theta]:
        """Where fits begin; the best of their ends counts."""
        ...

    def constants(self, theta: Theta, middle: Point) -> dict[str, float]:
        """The numbers as the paper has them."""
        ...


class Hoffmann:
    """`L = E + A / N^alpha + B / D^beta`; theta: ln E, ln a, ln b, alpha, beta.

    `a` and `b` are the summands at the middle.
    """

    name = "Hoffmann et al., 2203.15556 eq. 2"
    written = "E + A / N^alpha + B / D^beta"
    free = 5
    exponents = 2
    sizes: Mapping[str, int] = {"parameters": 3, "tokens": 3}

    def log_loss(self, theta: Theta, n: Logs, d: Logs) -> Logs:
        e, a, b, alpha, beta = theta
        return np.logaddexp(e, np.logaddexp(a - alpha * n, b - beta * d))

    def starts(self, points: Sequence[Point]) -> Iterator[Theta]:
        lowest = min(point.loss for point in points)
        for share, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5), (0.2, 0.5)):
            rest = math.log(lowest * (1 - share) / 2)
            yield math.log(lowest * share), rest, rest, alpha, beta

    def constants(self, theta: Theta, middle: Point) -> dict[str, float]:
        e, a, b, alpha, beta = theta
        return {
            "E": _exp(e),
            "A": _exp(a + alpha * math.log(middle.parameters)),
            "B": _exp(b + beta * math.log(middle.tokens)),
            "alpha": alpha,
            "beta": beta,
        }


class Kaplan:
    """`L = ((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D`; theta: ln n, ln d, alpha_N, alpha_D.

    `n` and `d` are the summands at the middle.
    """

    name = "Kaplan et al., 2001.08361 eq. 1.5"
    written = "((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D"
    free = 4
    exponents = 2
    sizes: Mapping[str, int] = {"parameters": 2, "tokens": 2}

    def log_loss(self, theta: Theta, n: Logs, d: Logs) -> Logs:
        of_n, of_d, alpha_n, alpha_d = theta
        return alpha_d * np.logaddexp(of_n - n * alpha_n / alpha_d, of_d - d)

    def starts(self, points: Sequence[Point]) -> Iterator[Theta]:
        lowest = min(point.loss for point in points)
        for alpha_n, alpha_d in itertools.product((0.05, 0.15, 0.4), (0.05, 0.15, 0.4)):
            half = math.log(lowest) / alpha_d - math.log(2)
            yield half, half, alpha_n, alpha_d

    def constants(self, theta: Theta, middle: Point) -> dict[str, float]:
        of_n, of_d, alpha_n, alpha_d = theta
        return {
            "Nc": _exp(math.log(middle.parameters) + of_n * alpha_d / alpha_n),
            "Dc": _exp(math.log(middle.tokens) + of_d),
            "alpha_N": alpha_n,
            "alpha_D": alpha_d,
        }


class Compute:
    """`L = E + c / C^gamma`, for runs that divide their FLOPs alike; theta: ln E, ln c, gamma.

    `c` is the summand at the middle.
    """

    name = "power law of compute"
    written = "E + c / C^gamma"
    free = 3
    exponents = 1
    sizes: Mapping[str, int] = {"flops": 3}

    def log_loss(self, theta: Theta, n: Logs, d: Logs) -> Logs:
        e, c, gamma = theta
        return np.logaddexp(e, c - gamma * (n + d))

    def starts(self, points: Sequence[Point]) -> Iterator[Theta]:
        lowest = min(point.loss for point in points)
        for share, gamma in itertools.product((0.2, 0.5, 0.8), (0.1, 0.3)):
            yield math.log(lowest * share), math.log(lowest * (1 - share)), gamma

    def constants(self, theta: Theta, middle: Point) -> dict[str, float]:
        e, c, gamma = theta
        return {
            "E": _exp(e),
            "c": _exp(c + gamma * math.log(middle.flops)),
            "gamma": gamma,
        }


FORMS: dict[str, Form] = {"hoffmann": Hoffmann(), "kaplan": Kaplan(), "compute": Compute()}


def _exp(log: float) -> float:
    """Of a constant that runs hardly determine; never more than a float holds."""
    return math.exp(min(log, LARGEST))


HUBER = 1e-3
"""Errors of the logarithm beyond which they count linearly (2203.15556 appendix D.3)."""
SPARE = 2
"""Runs that a fit needs beyond the numbers of its form: they tell how sure it is."""
DRAWS = 200
"""How many times a law is fitted again, for the intervals."""
SEED = 0
MOST_STEPS, MOST_AGAIN = 300, 60
"""Evaluations of a first fit, and of one to losses drawn anew, from each start; losses that no law
fits would take thousands. With fewer, or from one start, intervals come out too narrow."""
LOW, HIGH = 0.025, 0.975
SLOWEST, STEEPEST = 1e-3, 3.0
"""The exponents that a fit may come to."""
RELATIVE_STEP = 2.0**-26
"""Of the forward differences, times max(1, |theta|): the square root of float64's precision."""
APART = 0.1
"""Root mean square that ln D must have beside its regression on ln N, so that both can be told."""


class Estimate(NamedTuple):
    """A figure, with the interval that holds it in 95 % of such cases, if the form holds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        form: of the law.
        points: runs that it was fitted to.
        middle: their geometric mean.
        theta: the fitted numbers.
        error: standard deviation of the logarithm of a loss around the law, in further runs too.
        others: the numbers fitted to losses drawn anew, and the error of each draw.
    """

    form: Form
    points: Sequence[Point]
    middle: Point
    theta: Theta
    error: float
    others: Sequence[tuple[Theta, float]] = field(repr=False)

    def predict(self, point: Point) -> Estimate:
        """The loss of a further run."""
        rng = np.random.default_rng(SEED)
        sizes = _log_sizes([point], self.middle)
        drawn = [
            self.form.log_loss(theta, *sizes)[0] + rng.normal(0, error)
            for theta, error in self.others
        ]
        logs = (self.form.log_loss(self.theta, *sizes)[0], *np.quantile(drawn, (LOW, HIGH)))
        return Estimate(*(math.exp(log) for log in logs))

    def constants(self) -> dict[str, Estimate]:
        """The numbers as the paper has them, each with its interval."""
        every = [self.form.constants(theta, self.middle) for theta, _ in self.others]
        found: dict[str, Estimate] = {}
        for name, value in self.form.constants(self.theta, self.middle).items():
            low, high = np.quantile([constants[name] for constants in every], (LOW, HIGH))
            found[name] = Estimate(value, float(low), float(high))
        return found


def fit_law(form: Form, points: Sequence[Point], draws: int = DRAWS) -> Law:
    """Fit a form to runs.

    Args:
        form: one of `FORMS`.
        points: at least `fewest` of the form, and not all of one size.
        draws: how many times it is fitted again, to losses drawn anew.

    Raises:
        WorkhorseError: there are too few points, or SciPy is missing.
    """
    if few := too_few(form, points):
        raise WorkhorseError(f"{form.written} has {form.free} numbers to find: {few}")
    middle = Point(
        math.exp(fmean(math.log(point.parameters) for point in points)),
        math.exp(fmean(math.log(point.tokens) for point in points)),
    )
    sizes = _log_sizes(points, middle)
    measured = np.log([point.loss for point in points])
    theta = _fitted(form, sizes, measured, form.starts(points), MOST_STEPS)
    fitted = form.log_loss(theta, *sizes)
    left = len(points) - form.free
    error = math.sqrt(((measured - fitted) ** 2).sum() / left)
    rng = np.random.default_rng(SEED)
    others: list[tuple[Theta, float]] = []
    # Where the fit let a summand vanish, no slope leads back from there: hence a second start.
    again = [theta, next(iter(form.starts(points)))]
    for _ in range(draws):
        spread = error * math.sqrt(left / rng.chisquare(left))
        drawn = fitted + rng.normal(0, spread, len(points))
        others.append((_fitted(form, sizes, drawn, again, MOST_AGAIN), spread))
    return Law(form, points, middle, theta, error, others)


def fewest(form: Form) -> int:
    """The fewest runs that a form can be fitted to."""
    return form.free + SPARE


def too_few(form: Form, points: Sequence[Point]) -> str:
    """Why a form cannot be fitted to some points; empty if it can."""
    if len(points) < fewest(form):
        return f"{fewest(form)} runs are the fewest, {len(points)} given"
    for what, least in form.sizes.items():
        if (found := len({getattr(point, what) for point in points})) < least:
            return f"{least} different {what} are the fewest, {found} given"
    if {"parameters", "tokens"} <= form.sizes.keys() and _rise_together(points):
        return "tokens rise with parameters in one way; train some sizes on more or fewer as well"
    return ""


def _rise_together(points: Sequence[Point]) -> bool:
    """Whether tokens are nearly a power of the parameters, so that no fit tells them apart."""
    n, d = _log_sizes(points, points[0])
    rest = (d - d.mean()) - np.polyval(np.polyfit(n, d - d.mean(), 1), n)
    return bool(np.sqrt((rest**2).mean()) < APART)


def check_points(points: Sequence[Point]) -> None:
    """Refuse points that no form can be fitted to.

    Raises:
        WorkhorseError: with the reason of the form that needs the fewest.
    """
    if all(too_few(form, points) for form in FORMS.values()):
        reason = too_few(min(FORMS.values(), key=fewest), points)
        raise WorkhorseError(f"no law can be fitted to these runs: {reason}; add runs")


def _log_sizes(points: Sequence[Point], middle: Point) -> tuple[Logs, Logs]:
    """Logarithms of parameters and tokens, less those of the middle."""
    n = np.log([point.parameters / middle.parameters for point in points])
    return n, np.log([point.tokens / middle.tokens for point in points])


def _fitted(
    form: Form, sizes: tuple[Logs, Logs], measured: Logs, starts: Iterable[Theta], most: int
) -> Theta:
    """The numbers with the least error, after at most `most` evaluations from each start."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise WorkhorseError(
            f"laws are fitted by SciPy, which is not installed; {to_install('compare')}"
        ) from None

    def errors(theta: Any) -> NDArray[np.float64]:
        return measured - form.log_loss(theta, *sizes)

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of `errors`, (runs, free), by forward differences, all columns in one evaluation."""
        steps = RELATIVE_STEP * np.maximum(1, abs(theta))
        moved = theta[:, None] + np.diag(steps)
        return ((errors(moved[..., None]) - errors(theta)) / steps[:, None]).T

    coefficients = form.free - form.exponents
    low = [-math.inf] * coefficients + [SLOWEST] * form.exponents
    high = [math.inf] * coefficients + [STEEPEST] * form.exponents
    ends: list[Any] = [
        least_squares(
            errors,
            list(start),
            jac=jacobian,  # pyright: ignore[reportArgumentType]
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER,
            max_nfev=most,
        )
        for start in starts
    ]
    return tuple(float(value) for value in min(ends, key=lambda end: end.cost).x)
