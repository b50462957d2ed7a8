"""Rounds run in turn, and their statistics.

An absolute time on a shared machine means little: the same program takes half again as long when a
neighbour is busy. So contestants take turns (A B C A B C …) and are compared round by round.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(takes: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Results of each function by round; all complete round r before any starts round r + 1."""
    results: dict[str, list[T]] = {name: [] for name in takes}
    for name, _, taken in turns(takes, rounds):
        results[name].append(taken)
    return results


def turns(takes: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[tuple[str, int, T]]:
    """Yield the results of `in_turn` as they arrive: name, round (from 1) and result."""
    for number in range(1, rounds + 1):
        for name, take in takes.items():
            yield name, number, take()


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the quotients of values of the same round."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(above / below for above, below in pairs)
