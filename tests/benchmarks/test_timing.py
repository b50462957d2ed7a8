"""The order of measurements, and the computation of ratios."""

import pytest
import torch

from benchmarks.harness import limits
from benchmarks.harness.timing import in_turn, ratio


def test_contestants_take_turns():
    calls: list[str] = []

    def take(name: str) -> int:
        calls.append(name)
        return len(calls)

    results = in_turn({name: lambda name=name: take(name) for name in "ABC"}, rounds=2)

    assert "".join(calls) == "ABCABC"
    assert results == {"A": [1, 4], "B": [2, 5], "C": [3, 6]}


def test_a_ratio_is_of_the_same_round():
    # The second round was disturbed for all: a ratio of medians or means would be wrong.
    assert ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_a_lost_round_is_no_ratio():
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_products_that_onednn_lacks_are_measured_by_pytorch(monkeypatch: pytest.MonkeyPatch):
    def lacks(*_: object) -> torch.Tensor:
        raise RuntimeError("could not create a primitive descriptor for the inner product")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lacks)
    ways = limits._forward_ways(torch.ones(2, 3), torch.ones(4, 3))
    assert [way().shape for way in ways] == [(2, 4)]
