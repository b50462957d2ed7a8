"""Rounds taken in turn, and what is said about them.

An absolute time on a shared machine means little: the same program takes half again as long when a
neighbour is busy. So contestants take turns (A B C A B C …), and are compared round by round.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(takes: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each gives in every round; all have had round r before any has round r + 1."""
    results: dict[str, list[T]] = {name: [] for name in takes}
    for _ in range(rounds):
        for name, take in takes.items():
            results[name].append(take())
    return results


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the quotients of the same round."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(above / below for above, below in pairs)
