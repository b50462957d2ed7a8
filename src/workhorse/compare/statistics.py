"""Means and differences over seeds with confidence intervals (Student's t), and verdicts in words.

Lists of numbers in, numbers out; nothing here knows what was measured. The distributions are
SciPy's, from the extra `compare`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from workhorse.errors import WorkhorseError, to_install

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
"""The largest p that counts as a difference shown."""
POWER = 0.8
"""The share of studies that would show a difference as large as `detectable` gives."""
MOST_SEEDS = 1000
"""More are not looked for, see `seeds_for`."""
NODES = 200
"""Of the integral over the deviations that a study may find, see `power`."""
FEWEST = 2
"""Values that an interval needs."""


@dataclass(frozen=True)
class Interval:
    """A mean and the interval that covers the true one in 95 % of such studies."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """The mean of paired differences, its interval, and how likely chance alone is so far off."""

    deviation: float
    """Standard deviation of the differences."""
    p: float
    """Two-sided, of a paired t-test: for chance alone to give a mean at least as far from zero."""


def scipy_stats() -> Any:
    """`scipy.stats`.

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
    """The mean of two or more values with its 95 % interval, `mean ± t(n-1) · s / √n`."""
    assert len(values) >= FEWEST, "one value has no interval"
    reach = _quantile(1 - LEVEL / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    mean = fmean(values)
    return Interval(mean, mean - reach, mean + reach)


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The differences `first - second` of two or more pairs, with the paired t-test.

    Equal differences have no spread: p is then 0, or 1 if they are zero.
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
    """The p of several tests, corrected so that a false alarm in any of them is as rare as in one.

    The i-th smallest of m is multiplied by `m - i + 1`; none becomes smaller than the one before.

    Paper: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    corrected = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(effect: float, deviation: float, n: int, level: float = LEVEL) -> float:
    """How often a paired t-test shows a true difference.

    The mean of `P(|Z + shift| > limit · s)` over the distribution of the standard deviation s that
    a study finds; SciPy's noncentral t, which is the same, fails far from its centre.

    Args:
        effect: the true difference.
        deviation: the standard deviation of the differences, above 0.
        n: pairs, two or more.
        level: the largest p that counts.
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
    """The smallest true difference that a paired t-test of n pairs shows with 80 % power.

    Found by halving an interval, to a millionth of itself. 0 if the differences have no spread.
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
    """The fewest pairs that show a true difference with 80 % power; None: more than a thousand."""
    if deviation == 0:
        return FEWEST
    if power(effect, deviation, MOST_SEEDS, level) < POWER:
        return None
    few, many = FEWEST - 1, MOST_SEEDS
    while many - few > 1:
        middle = (few + many) // 2
        if power(effect, deviation, middle, level) >= POWER:
            many = middle
        else:
            few = middle
    return many


def _quantile(probability: float, freedom: int) -> float:
    return float(scipy_stats().t.ppf(probability, freedom))


UNITS = {"loss": "nats", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Verdict:
    """The outcome of one variant beside the baseline."""

    outcome: Literal["better", "worse", "equal", "not shown"]
    """`equal`: within the smallest effect that matters."""
    words: str
    detectable: float
    """The difference that a study like this shows four times in five, in the unit of the loss."""


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
    """Judge the paired differences of a variant's losses from the baseline's.

    Args:
        name: of the variant.
        baseline: that it is compared with.
        found: the variant's loss minus the baseline's.
        p: of the test, after Holm's correction.
        n: seeds.
        tests: variants compared with the baseline.
        unit: of the loss.
        smallest_effect: a difference that would matter.
    """
    level = LEVEL / tests  # what the strictest of Holm's steps asks
    seen = detectable(found.deviation, n, level)
    could = f"this study could have seen one of {seen:.2g} {unit} or more (80 % power)"
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
            f"{name} and {baseline} differ by less than {smallest_effect:g} {unit}, the smallest "
            f"difference that matters here: by {found.low:+.2g} to {found.high:+.2g}"
        )
        return Verdict("equal", words, seen)
    words = f"no difference shown between {name} and {baseline}; {could}"
    if found.p < LEVEL:
        words += (
            f"; alone it would count (p = {found.p:.2g}), among {tests} comparisons it does not"
        )
    if smallest_effect is not None and seen > smallest_effect:
        needed = seeds_for(smallest_effect, found.deviation, level)
        many = f"about {needed}" if needed else "more than a thousand"
        words += f"; to see {smallest_effect:g} it would take {many} seeds"
    return Verdict("not shown", words, seen)


def _span(small: float, large: float) -> str:
    """Two figures with as many places as tell them apart, three at least."""
    for places in (3, 4, 5, 6):
        texts = f"{small:.{places}f}", f"{large:.{places}f}"
        if texts[0] != texts[1] and float(texts[0]) > 0:
            break
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _beside(small: float, large: float, matters: float) -> str:
    if small >= matters:
        return f", all of it more than the {matters:g} that would matter"
    if large < matters:
        return f", less than the {matters:g} that would matter"
    return f"; this may be more or less than the {matters:g} that would matter"
