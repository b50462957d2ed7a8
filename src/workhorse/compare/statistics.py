"""Confidence intervals and paired tests over seeds (Student's t), and verdicts as sentences.

The functions need SciPy, which the optional extra `compare` installs.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from workhorse.errors import WorkhorseError, to_install

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
"""Significance level: a difference is significant if p is below it."""
POWER = 0.8
"""Statistical power required by `detectable` and `seeds_for`: the fraction of studies in which a
true difference is significant."""
MOST_SEEDS = 1000
"""Largest number of seeds that `seeds_for` returns."""
NODES = 200
"""Number of quadrature nodes for the integral over sample standard deviations in `power`."""
FEWEST = 2
"""Minimum number of values (seeds) for a confidence interval."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """The mean of paired differences, its 95 % confidence interval and its p-value."""

    deviation: float
    """Standard deviation of the differences."""
    p: float
    """Two-sided p-value of a paired t-test."""


def scipy_stats() -> Any:
    """Import and return `scipy.stats`.

    Raises:
        WorkhorseError: SciPy is not installed.
    """
    try:
        import scipy.stats
    except ImportError:
        raise WorkhorseError(
            f"intervals and tests need SciPy, which is not installed; {to_install('compare')}"
        ) from None
    return scipy.stats


def interval(values: Sequence[float]) -> Interval:
    """The mean of values and its 95 % confidence interval, `mean ± t(n-1) · s / √n`.

    n is the number of values, at least 2, and s their standard deviation.
    """
    assert len(values) >= FEWEST, "one value has no interval"
    reach = _quantile(1 - LEVEL / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    mean = fmean(values)
    return Interval(mean, mean - reach, mean + reach)


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Paired t-test of the differences `first - second`, for two or more pairs.

    If all differences are equal, the p-value is 0; if all are zero, it is 1.
    """
    differences = [one - other for one, other in zip(first, second, strict=True)]
    found = interval(differences)
    deviation = stdev(differences)
    if deviation > 0:
        t = found.mean / deviation * math.sqrt(len(differences))
        p = float(2 * scipy_stats().t.sf(abs(t), len(differences) - 1))
    else:
        p = 0.0 if found.mean else 1.0
    return Difference(found.mean, found.low, found.high, deviation, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of the p-values of several tests, which bounds the family-wise error rate.

    The i-th smallest of m p-values is multiplied by `m - i + 1`, then raised to the previous
    corrected value if it is smaller, and limited to 1. The order of `ps` is kept.

    Paper: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    corrected = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(effect: float, deviation: float, n: int, level: float = LEVEL) -> float:
    """The probability that a paired t-test is significant, given the true difference.

    Computed as the mean of `P(|Z + shift| > limit · s)` over the distribution of the sample
    standard deviation s. SciPy's noncentral t distribution gives the same value but fails for large
    effects.

    Args:
        effect: the true difference.
        deviation: the standard deviation of the differences, above 0.
        n: the number of pairs, two or more.
        level: the significance level.
    """
    import numpy as np

    stats = scipy_stats()
    shift = abs(effect) / deviation * math.sqrt(n)
    limit = _quantile(1 - level / 2, n - 1)
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    spread = limit * np.sqrt(stats.chi2.ppf((nodes + 1) / 2, n - 1) / (n - 1))
    shown = stats.norm.sf(spread - shift) + stats.norm.cdf(-spread - shift)
    return float(weights @ shown / 2)


def detectable(deviation: float, n: int, level: float = LEVEL) -> float:
    """The smallest true difference that a paired t-test of n pairs detects with 80 % power.

    It is found by bisection to a relative precision of 1e-6. It is 0 if `deviation` is 0.
    """
    if deviation == 0:
        return 0.0
    low, high = 0.0, deviation
    while power(high, deviation, n, level) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, deviation, n, level) >= POWER else (middle, high)
    return high


def seeds_for(effect: float, deviation: float, level: float = LEVEL) -> int | None:
    """The smallest number of seeds with which a paired t-test detects an effect with 80 % power.

    None if more than `MOST_SEEDS` seeds are needed.

    Args:
        effect: the true difference.
        deviation: the standard deviation of the differences.
        level: the significance level.
    """
    if deviation == 0:
        return FEWEST
    if power(effect, deviation, MOST_SEEDS, level) < POWER:
        return None
    numbers = range(FEWEST, MOST_SEEDS)
    return FEWEST + bisect_left(numbers, POWER, key=lambda n: power(effect, deviation, n, level))


def _quantile(probability: float, freedom: int) -> float:
    return float(scipy_stats().t.ppf(probability, freedom))


UNITS = {"loss": "nats", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Verdict:
    """The outcome of comparing one variant with the baseline."""

    outcome: Literal["better", "worse", "equal", "not shown"]
    """The outcome for the variant. `equal` means that the difference is smaller than the smallest
    effect that matters; `not shown` means that the difference is not significant."""
    words: str
    """The outcome as a sentence."""
    detectable: float
    """The smallest true difference that this study detects with 80 % power, in the unit of the
    loss."""


def verdict(
    name: str,
    baseline: str,
    found: Difference,
    p: float,
    *,
    n: int,
    tests: int,
    unit: str,
    smallest_effect: float | None = None,
) -> Verdict:
    """Decide whether a variant is better or worse than the baseline, from paired differences.

    Args:
        name: the name of the variant.
        baseline: the name of the variant that the others are compared with.
        found: the paired differences: the variant's losses minus the baseline's.
        p: the p-value after Holm's correction.
        n: the number of seeds.
        tests: the number of variants compared with the baseline.
        unit: the unit of the loss.
        smallest_effect: the smallest difference that matters; None if the study sets none.
    """
    level = LEVEL / tests  # the significance level of the strictest step of Holm's correction
    seen = detectable(found.deviation, n, level)
    could = f"this study can detect {seen:.2g} {unit} or more (80 % power)"
    if p < LEVEL:
        outcome = "better" if found.mean < 0 else "worse"
        small, large = sorted((abs(found.low), abs(found.high)))
        words = f"{name} is {outcome} than {baseline} by {_span(small, large)} {unit}"
        if smallest_effect is not None:
            words += _beside(small, large, smallest_effect)
        return Verdict(outcome, words, seen)
    within = max(abs(found.low), abs(found.high))
    if smallest_effect is not None and within < smallest_effect:
        words = (
            f"{name} and {baseline} are equivalent within {smallest_effect:g} {unit}, the smallest "
            f"effect that matters: the difference is {found.low:+.2g} to {found.high:+.2g}"
        )
        return Verdict("equal", words, seen)
    words = f"no significant difference between {name} and {baseline}; {could}"
    if found.p < LEVEL:
        words += (
            f"; significant as a single test (p = {found.p:.2g}), not among {tests} comparisons"
        )
    if smallest_effect is not None and seen > smallest_effect:
        needed = seeds_for(smallest_effect, found.deviation, level)
        many = f"about {needed}" if needed else "more than 1,000"
        words += f"; detecting {smallest_effect:g} needs {many} seeds"
    return Verdict("not shown", words, seen)


def _span(small: float, large: float) -> str:
    """Format a range of two numbers with the decimal places (three to six) that tell them apart."""
    for places in (3, 4, 5, 6):
        texts = f"{small:.{places}f}", f"{large:.{places}f}"
        if texts[0] != texts[1] and float(texts[0]) > 0:
            break
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _beside(small: float, large: float, matters: float) -> str:
    if small >= matters:
        return f", more than the smallest effect of {matters:g}"
    if large < matters:
        return f", less than the smallest effect of {matters:g}"
    return f"; this may be above or below the smallest effect of {matters:g}"
