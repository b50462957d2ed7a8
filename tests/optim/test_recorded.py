"""An update is recorded the second time its tensors have the same addresses, then replayed."""

from collections.abc import Callable

import torch

from workhorse.optim.compiled import MOST_RECORDINGS, Recorded


class Trace:
    """An update and two recorders for it, which log their calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def update(self) -> None:
        self.seen.append("plain")

    def record(self, update: Callable[[], object]) -> Callable[[], object]:
        assert update == self.update
        self.seen.append("record")
        return lambda: self.seen.append("replay")

    def fail(self, update: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_the_second_update_in_a_place_is_recorded_and_each_later_one_replayed() -> None:
    trace, tensors = Trace(), [torch.zeros(3), torch.zeros(2)]
    recorded = Recorded(trace.record)
    for _ in range(4):
        recorded(trace.update, tensors)
    assert trace.seen == ["plain", "record", "replay", "replay", "replay"]


def test_elsewhere_it_runs_plainly_until_it_comes_back() -> None:
    trace, here, there = Trace(), [torch.zeros(3)], [torch.zeros(3)]
    recorded = Recorded(trace.record)
    for tensors in (here, here, there, here, there):
        recorded(trace.update, tensors)
    assert trace.seen == ["plain", "record", "replay", "plain", "replay", "record", "replay"]


def test_a_layout_is_part_of_the_place() -> None:
    trace, square = Trace(), torch.zeros(3, 3)
    recorded = Recorded(trace.record)
    recorded(trace.update, [square])
    recorded(trace.update, [square.t()])
    assert trace.seen == ["plain", "plain"]


def test_the_oldest_place_is_forgotten() -> None:
    trace, places = Trace(), [[torch.zeros(3)] for _ in range(MOST_RECORDINGS + 1)]
    recorded = Recorded(trace.record)
    for tensors in (*places, places[0]):
        recorded(trace.update, tensors)
    assert trace.seen == ["plain"] * (MOST_RECORDINGS + 2)


def test_what_cannot_be_recorded_runs_plainly() -> None:
    trace, tensors = Trace(), [torch.zeros(3)]
    recorded = Recorded(trace.fail)
    for _ in range(3):
        recorded(trace.update, tensors)
    assert trace.seen == ["plain"] * 3
