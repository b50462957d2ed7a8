"""Processes of one attempt find each other in a store with entries of earlier attempts."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from workhorse.parallel.processes.world import meet

PATIENCE = timedelta(seconds=20)


def started(store: dist.Store, ranks: list[int]) -> dict[int, dist.Store]:
    """The stores that `meet` returns to processes started in this order."""
    met: dict[int, dist.Store] = {}

    def start(rank: int) -> None:
        met[rank] = meet(store, rank, len(ranks), PATIENCE)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        thread.join(0.2)
    for thread in threads:
        thread.join()
    return met


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_those_of_before_are_not_met(ranks: list[int]) -> None:
    store = dist.HashStore()
    before = started(store, [0, 1, 2])
    for one in before.values():
        one.set("address", "nobody")
    now = started(store, ranks)
    now[0].set("address", "here")
    assert all(now[rank].get("address") == b"here" for rank in ranks)


def test_a_first_that_does_not_come_is_told() -> None:
    store = dist.HashStore()
    store.set("first", "gone")
    with pytest.raises(RuntimeError, match="rank 0 of 2 processes does not respond"):
        meet(store, 1, 2, timedelta(seconds=0.1))
