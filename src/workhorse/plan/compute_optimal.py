"""How large a model and how many tokens a given amount of arithmetic is best spent on.

Each law is what its authors fitted, to their models and their text; that they differ by more than
their last digits is part of the answer. Budgets are in floating-point operations, 6 · N · D.
"""

from collections.abc import Callable
from typing import NamedTuple

from workhorse.models.flops import FLOPS_PER_PARAMETER

PF_DAY = 1e15 * 24 * 3600
"""Floating-point operations of a petaflop a second for a day."""


class Optimum(NamedTuple):
    """What a law would spend a budget on."""

    law: str
    parameters: float
    tokens: float
    loss: float | None
    """In nats per token, where the law predicts it."""


class Parametric(NamedTuple):
    """`L(N, D) = E + A / N^alpha + B / D^beta` (2203.15556 eq. 2)."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """The minimum along `6 · N · D = flops` (2203.15556 eq. 4)."""
        product, total = flops / FLOPS_PER_PARAMETER, self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / total)
        return g * product ** (self.beta / total), product ** (self.alpha / total) / g


HOFFMANN = Parametric(1.69, 406.4, 410.7, 0.34, 0.28)
"""2203.15556 §3.3, eq. 10."""
BESIROGLU = Parametric(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The same points fitted again: 2404.10102 table 1."""
LEAST_FITTED = 6e18
"""The smallest budget of 2203.15556's curves of equal arithmetic (§3.2)."""
CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""About what the first two ways of 2203.15556 come to at every budget (its table 3)."""


def optima(flops: float) -> list[Optimum]:
    """What each law would train with a budget of so many operations."""
    return [Optimum(name, *law(flops)) for name, law in LAWS.items()]


def _kaplan(flops: float) -> tuple[float, float, float | None]:
    """Without embeddings, at the smallest compute for each loss (2001.08361 table 6)."""
    days = flops / PF_DAY
    return 1.3e9 * days**0.73, 2e10 * days**0.27, None


def _twenty(flops: float) -> tuple[float, float, float | None]:
    parameters = (flops / (FLOPS_PER_PARAMETER * CHINCHILLA_TOKENS_PER_PARAMETER)) ** 0.5
    return parameters, CHINCHILLA_TOKENS_PER_PARAMETER * parameters, None


def _fitted(law: Parametric) -> Callable[[float], tuple[float, float, float | None]]:
    def optimum(flops: float) -> tuple[float, float, float | None]:
        parameters, tokens = law.optimum(flops)
        return parameters, tokens, law.loss(parameters, tokens)

    return optimum


LAWS: dict[str, Callable[[float], tuple[float, float, float | None]]] = {
    "Kaplan et al., 2001.08361": _kaplan,
    "Hoffmann et al., 2203.15556, 20 tokens a parameter": _twenty,
    "Hoffmann et al., 2203.15556, parametric fit": _fitted(HOFFMANN),
    "Besiroglu et al., 2404.10102, fitted again": _fitted(BESIROGLU),
}
