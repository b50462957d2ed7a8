"""What a comparison shows, in words that claim no more than it does."""

from dataclasses import dataclass
from typing import Literal

from workhorse.compare.statistics import (
    LEVEL,
    Difference,
    detectable,
    seeds_for,
)

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
