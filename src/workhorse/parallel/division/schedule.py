"""The order of the passes of a step's micro-batches, on one process and in a pipeline."""

from collections.abc import Iterator
from typing import NamedTuple


class Turn(NamedTuple):
    """What a process does next."""

    micro_batch: int
    forward: bool
    """Or else its backward pass."""


def one_forward_one_backward(micro_batches: int, stages: int = 1, stage: int = 0) -> Iterator[Turn]:
    """The passes of a stage, of each micro-batch one in each direction (2104.04473 §2.2.1).

    Every stage has at most as many micro-batches between their passes as stages follow it, and one.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from (Turn(number, True) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield Turn(ahead + number, True)
        yield Turn(number, False)
    yield from (Turn(number, False) for number in range(micro_batches - ahead, micro_batches))
