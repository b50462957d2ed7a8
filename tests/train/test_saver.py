"""Checkpoints are written in a thread while training continues."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.checkpoints import MODEL, OPTIMIZER, CheckpointStore
from workhorse.errors import WorkhorseError
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.processes.world import ALONE, World
from workhorse.train import saver as saver_module
from workhorse.train.saver import Saver


class SlowStore(CheckpointStore):
    """A store that waits for an event before it fills a checkpoint's files, and may then fail."""

    def __init__(self, folder: Path, failure: WorkhorseError | None = None) -> None:
        super().__init__(folder)
        self.may = threading.Event()
        self.failure = failure

    def fill(self, step: int, tensors: Mapping[str, Any]) -> None:
        assert self.may.wait(60)
        if self.failure:
            raise self.failure
        super().fill(step, tensors)


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {MODEL: {"weight": torch.zeros(3, 4)}, OPTIMIZER: {"weight.mean": torch.zeros(3)}}


def given() -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    return {file: partial(dict, named) for file, named in tensors().items()}


def test_a_checkpoint_holds_the_values_of_its_own_step(tmp_path: Path) -> None:
    store, told = SlowStore(tmp_path), []
    saver = Saver(store, lambda step, path: told.append((step, path.name)), ALONE)
    current = tensors()
    saver.save(5, {file: partial(dict, named) for file, named in current.items()}, {"step": 5})
    for named in current.values():
        for tensor in named.values():
            tensor.add_(1)  # the next step changes them while the file is still empty
    saver.look()
    assert told == []
    assert store.newest() is None
    store.may.set()
    saver.wait()
    assert told == [(5, "step-00000005")]
    checkpoint = store.newest()
    assert checkpoint is not None
    assert not checkpoint.model["weight"].any()
    assert not checkpoint.optimizer["weight.mean"].any()


def test_a_failure_is_raised_when_it_is_looked_for(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, failure=WorkhorseError("full"))
    saver = Saver(store, lambda step, path: None, ALONE)
    saver.save(5, given(), {})
    store.may.set()
    with pytest.raises(WorkhorseError, match="full"):
        saver.save(6, given(), {})
    assert saver.failed
    assert list(tmp_path.iterdir()) == []


class Others(World):
    """World in which another rank reports a failed save, as seen by rank 0."""

    def apart(self) -> World:
        return self

    def largest(self, number: int) -> int:
        return 1


def test_what_another_process_cannot_write_is_given_up_by_all(tmp_path: Path) -> None:
    saver = Saver(
        CheckpointStore(tmp_path), lambda step, path: None, Others(0, 2, ParallelismConfig(shard=2))
    )
    saver.save(5, given(), {})
    with pytest.raises(WorkhorseError, match="another process could not write its part"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [0, None])
def test_without_memory_for_copies_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    monkeypatch.setattr(saver_module, "free_memory", lambda: free)
    told: list[int] = []
    saver = Saver(CheckpointStore(tmp_path), lambda step, path: told.append(step), ALONE)
    saver.save(5, given(), {})
    assert told == [5]
