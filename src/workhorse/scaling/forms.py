"""The forms of law that are fitted: loss as a function of parameters and tokens.

Sizes enter as logarithms, less those of the middle: the geometric mean of the runs. There the
coefficients are as large as losses, which keeps the fit well conditioned.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workhorse.models.flops import FLOPS_PER_PARAMETER

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
