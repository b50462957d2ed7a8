"""Fit a scaling law to runs, and predict the losses of other runs with 95 % intervals.

The fit uses the logarithms of parameters N and tokens D, relative to their geometric means over the
runs (called `middle`). The coefficients then have the magnitude of losses, which keeps the fit well
conditioned.

The fit follows 2203.15556 appendix D.3: it minimizes the Huber loss of the errors in ln(loss), from
several starting points. The intervals come from a parametric bootstrap: the law is fitted again to
losses that are drawn at random around it. The standard deviation of the errors is uncertain with
few runs, so it is drawn too. The predicted ln(loss) of another run then follows Student's t with
n - p degrees of freedom, for n runs and p fitted coefficients.
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
"""The fitted coefficients of a law, in the order that its form defines."""
Logs = NDArray[np.float64]
"""An array with one logarithm per run."""
LARGEST = math.log(sys.float_info.max)
"""The logarithm of the largest float."""


class Point(NamedTuple):
    """The sizes of a run and its loss; the loss is NaN for a run to be predicted."""

    parameters: float
    """Effective number of parameters: training FLOPs per token, including attention, divided by
    `FLOPS_PER_PARAMETER`."""
    tokens: float
    """Number of training tokens."""
    loss: float = math.nan
    """Held-out loss in nats per token."""
    name: str = ""

    @property
    def flops(self) -> float:
        """FLOPs of the whole training run."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


class Form(Protocol):
    """The formula of a scaling law, with coefficients to fit."""

    name: str
    """Name of the law, with its source."""
    written: str
    """The formula as text."""
    free: int
    """Number of fitted coefficients."""
    exponents: int
    """Number of coefficients that are exponents. They are the last ones."""
    sizes: Mapping[str, int]
    """For fields of `Point`, by name: the minimum number of different values that a fit needs."""

    def log_loss(self, theta: Theta, n: Logs, d: Logs) -> Logs:
        """The logarithms of the losses that the law predicts for runs.

        Args:
            theta: the coefficients, as numbers or as arrays that broadcast with n and d.
            n: for each run, the logarithm of its parameters, relative to the geometric mean over
                the fitted runs.
            d: the same for its tokens.
        """
        ...

    def starts(self, points: Sequence[Point]) -> Iterator[Theta]:
        """Yield initial coefficients for the fit. The best of the fits that start there is used."""
        ...

    def constants(self, theta: Theta, middle: Point) -> dict[str, float]:
        """Convert the coefficients to the constants of the formula as the paper defines them.

        The coefficients are relative to `middle`, the geometric mean over the fitted runs.
        """
        ...


class Hoffmann:
    """The law `L = E + A / N^alpha + B / D^beta`.

    Its coefficients are ln E, ln a, ln b, alpha, beta. `a` and `b` are the values of `A / N^alpha`
    and `B / D^beta` at the geometric means of N and D over the runs.
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
    """The law `L = ((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D`.

    Its coefficients are ln n, ln d, alpha_N, alpha_D. `n` and `d` are the values of the two terms
    of the sum at the geometric means of N and D over the runs.
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
    """The law `L = E + c / C^gamma`, with the training FLOPs C.

    It is valid for runs that split their FLOPs between parameters and tokens in the same way. Its
    coefficients are ln E, ln c', gamma. `c'` is the value of `c / C^gamma` at the geometric mean of
    C over the runs.
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
    """Compute `exp(log)`, limited to the largest float. Uncertain constants could overflow."""
    return math.exp(min(log, LARGEST))


HUBER = 1e-3
"""Threshold of the Huber loss, in units of the logarithm of the loss (2203.15556 appendix D.3)."""
SPARE = 2
"""Number of runs required in addition to the number of coefficients, to estimate the
uncertainty."""
DRAWS = 200
"""Default number of bootstrap fits, for the 95 % intervals."""
SEED = 0
"""Seed of the random draws, so that results are reproducible."""
MOST_STEPS, MOST_AGAIN = 300, 60
"""Maximum number of evaluations per starting point, in the first fit and in a bootstrap fit.
Without a limit, losses that no law fits would need thousands. With lower limits, intervals are too
narrow."""
LOW, HIGH = 0.025, 0.975
"""Quantiles of the bootstrap fits that bound a 95 % interval."""
SLOWEST, STEEPEST = 1e-3, 3.0
"""Lower and upper bound of the fitted exponents."""
RELATIVE_STEP = 2.0**-26
"""Step of the forward differences, relative to max(1, |theta|): the square root of float64's
epsilon."""
APART = 0.1
"""Minimum root mean square of the residuals of ln D after linear regression on ln N. With smaller
residuals, the effects of parameters N and tokens D cannot be separated."""


class Estimate(NamedTuple):
    """A value with its 95 % interval. The interval assumes that the form of the law is right."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A scaling law fitted to runs.

    Attributes:
        form: the form of the law.
        points: the runs that the law was fitted to.
        middle: the geometric means of the runs' parameters and tokens.
        theta: the fitted coefficients.
        error: standard deviation of ln(measured loss) - ln(predicted loss) over the runs.
        others: coefficients and standard deviation of the errors of each bootstrap fit.
    """

    form: Form
    points: Sequence[Point]
    middle: Point
    theta: Theta
    error: float
    others: Sequence[tuple[Theta, float]] = field(repr=False)

    def predict(self, point: Point) -> Estimate:
        """Predict the loss of another run, with a 95 % interval."""
        rng = np.random.default_rng(SEED)
        sizes = _log_sizes([point], self.middle)
        drawn = [
            self.form.log_loss(theta, *sizes)[0] + rng.normal(0, error)
            for theta, error in self.others
        ]
        logs = (self.form.log_loss(self.theta, *sizes)[0], *np.quantile(drawn, (LOW, HIGH)))
        return Estimate(*(math.exp(log) for log in logs))

    def constants(self) -> dict[str, Estimate]:
        """The constants of the formula as the paper defines them, with 95 % intervals."""
        every = [self.form.constants(theta, self.middle) for theta, _ in self.others]
        found: dict[str, Estimate] = {}
        for name, value in self.form.constants(self.theta, self.middle).items():
            low, high = np.quantile([constants[name] for constants in every], (LOW, HIGH))
            found[name] = Estimate(value, float(low), float(high))
        return found


def fit_law(form: Form, points: Sequence[Point], draws: int = DRAWS) -> Law:
    """Fit a form of scaling law to runs.

    Args:
        form: one of `FORMS`.
        points: the runs: at least `fewest(form)`, of different sizes (see `too_few`).
        draws: number of bootstrap fits.

    Raises:
        WorkhorseError: the runs are too few or too similar, or SciPy is not installed.
    """
    if few := too_few(form, points):
        raise WorkhorseError(f"{form.written} has {form.free} coefficients to fit: {few}")
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
    # A term that vanished in the first fit has no gradient at theta, so a second start is needed.
    again = [theta, next(iter(form.starts(points)))]
    for _ in range(draws):
        spread = error * math.sqrt(left / rng.chisquare(left))
        drawn = fitted + rng.normal(0, spread, len(points))
        others.append((_fitted(form, sizes, drawn, again, MOST_AGAIN), spread))
    return Law(form, points, middle, theta, error, others)


def fewest(form: Form) -> int:
    """Minimum number of runs to which a form of law can be fitted."""
    return form.free + SPARE


def too_few(form: Form, points: Sequence[Point]) -> str:
    """The reason why a form of law cannot be fitted to points; empty if it can be fitted."""
    if len(points) < fewest(form):
        return f"at least {fewest(form)} runs are needed, {len(points)} given"
    for what, least in form.sizes.items():
        if (found := len({getattr(point, what) for point in points})) < least:
            return f"at least {least} different numbers of {what} are needed, {found} given"
    if {"parameters", "tokens"} <= form.sizes.keys() and _rise_together(points):
        return (
            "tokens are nearly a power of the parameters, so their effects cannot be separated; "
            "train some sizes on more or fewer tokens"
        )
    return ""


def _rise_together(points: Sequence[Point]) -> bool:
    """True if D is almost proportional to a power of N, for the points' tokens D and parameters N.

    A fit cannot separate the effects of D and N then.
    """
    n, d = _log_sizes(points, points[0])
    rest = (d - d.mean()) - np.polyval(np.polyfit(n, d - d.mean(), 1), n)
    return bool(np.sqrt((rest**2).mean()) < APART)


def check_points(points: Sequence[Point]) -> None:
    """Check that at least one form of law can be fitted to the points.

    Raises:
        WorkhorseError: no form can be fitted. The message names the reason for the simplest form.
    """
    if all(too_few(form, points) for form in FORMS.values()):
        reason = too_few(min(FORMS.values(), key=fewest), points)
        raise WorkhorseError(f"no law can be fitted to these runs: {reason}; add runs")


def _log_sizes(points: Sequence[Point], middle: Point) -> tuple[Logs, Logs]:
    """The logarithms of the points' parameters and tokens, relative to those of `middle`."""
    n = np.log([point.parameters / middle.parameters for point in points])
    return n, np.log([point.tokens / middle.tokens for point in points])


def _fitted(
    form: Form, sizes: tuple[Logs, Logs], measured: Logs, starts: Iterable[Theta], most: int
) -> Theta:
    """Fit the coefficients of a form of law to measured losses.

    Args:
        form: the form of the law.
        sizes: for each run, the logarithms of parameters and tokens relative to the middle.
        measured: the logarithms of the runs' losses.
        starts: coefficients to start from; the fit with the smallest error is returned.
        most: maximum number of evaluations per start.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise WorkhorseError(
            f"fitting laws needs SciPy, which is not installed; {to_install('compare')}"
        ) from None

    def errors(theta: Any) -> NDArray[np.float64]:
        return measured - form.log_loss(theta, *sizes)

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Jacobian of `errors`, shape (runs, coefficients), by forward differences."""
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
