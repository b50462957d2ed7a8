"""`micro_batch_size: auto`: what fits is found, and nothing else is changed by looking for it."""

import math
import mmap
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_run import assert_same_run
from workhorse.config import ConfigError
from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.memory import most_resident, resident
from workhorse.nn import Decoder
from workhorse.train import Recipe, estimate, read_metrics, train
from workhorse.train.recipe.recipe import TrainConfig
from workhorse.train.resume.random_state import random_state
from workhorse.train.step import micro_batch
from workhorse.train.step.build import build_step
from workhorse.train.step.micro_batch import MARGIN, fit_micro_batch, shares
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")
ROWS = 32


def a_batch(rows: int) -> Batch:
    tokens = torch.arange(rows * 8).remainder(11).view(rows, 8)
    return Batch(tokens, tokens, None, torch.zeros(rows, dtype=torch.int64))


def room_for(monkeypatch: pytest.MonkeyPatch, rows: float) -> None:
    """Let 10 MB and 100 MB a row be taken, and let there be as much as `rows` need."""
    most = [0]

    def backward(step: TrainingStep, batch: Batch) -> tuple[torch.Tensor, int]:
        most[0] = max(most[0], 10_000_000 + 100_000_000 * step.micro_batch_size)
        assert len(batch.tokens) == min(2 * step.micro_batch_size, ROWS)
        assert most[0] <= free, "the process would be ended"
        return plain(step, batch)

    plain = TrainingStep.backward
    free = int((10_000_000 + 100_000_000 * rows) / (1 - MARGIN)) + 16
    monkeypatch.setattr(TrainingStep, "backward", backward)
    monkeypatch.setattr("workhorse.train.step.micro_batch.free_memory", lambda: free)
    monkeypatch.setattr("workhorse.train.step.micro_batch.resident", lambda: 7)
    monkeypatch.setattr("workhorse.train.step.micro_batch.most_resident", lambda: 7 + most[0])


def config(batch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(steps=100, batch_size=batch_size, seq_len=8, **changes)


@pytest.mark.parametrize("room", [32, 31, 16, 15, 9, 8, 4, 2.5, 1.5, 1])
def test_the_largest_share_that_fits(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, room: float
) -> None:
    room_for(monkeypatch, room)
    step = build_step(decoder, config(ROWS, micro_batch_size="auto"), CPU, a_batch(ROWS))
    assert step.micro_batch_size == 2 ** math.floor(math.log2(room))


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, [1]), (2, [2, 1]), (7, [7, 4, 2, 1]), (32, [32, 16, 8, 4, 2, 1])]
)
def test_shares_halve(rows: int, expected: list[int]) -> None:
    assert shares(rows) == expected


def test_what_a_process_takes_is_measured() -> None:
    start = resident()
    assert most_resident() - start < 2**23
    size = 2**24 + 2**20  # Linux counts pages in batches, a CPU each: the last ones come later
    with mmap.mmap(-1, size) as taken:  # which the heap does not have from before
        for page in range(0, size, mmap.PAGESIZE):
            taken[page] = 1
    assert most_resident() - start >= 2**24


def test_looking_leaves_everything_as_it_was(decoder: Decoder) -> None:
    step = build_step(decoder, config(8), CPU)
    step.update(*step.backward(a_batch(8)), schedule=1.0)
    before = {name: tensor.clone() for name, tensor in step.optimizer.tensors().items()}
    weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    generators = random_state()
    fit_micro_batch(step, a_batch(8))
    assert random_state() == generators
    assert all(map(torch.equal, step.optimizer.tensors().values(), before.values()))
    assert all(map(torch.equal, decoder.state_dict().values(), weights.values()))
    assert not step.optimizer.gradients()
    assert step.micro_batch_size == 8


def test_no_room_for_one_row(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    monkeypatch.setattr("workhorse.train.step.micro_batch.free_memory", lambda: 2**20)
    monkeypatch.setattr(
        "workhorse.train.step.micro_batch.most_resident", lambda: resident() + 2**30
    )
    message = r"one row of 8 tokens takes 1,02\d MiB, and 1 MiB are free; shorten train.seq_len"
    with pytest.raises(WorkhorseError, match=message):
        build_step(decoder, config(8, micro_batch_size="auto"), CPU, a_batch(8))


def test_other_devices_are_refused(decoder: Decoder) -> None:
    step = build_step(decoder, config(8), CPU)
    step.device = torch.device("mps")
    with pytest.raises(WorkhorseError, match="auto works on CUDA and on a CPU, and device is mps"):
        fit_micro_batch(step, a_batch(8))


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size"):
        config(8, micro_batch_size="most")


def answer(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let the search be made, and come to this."""

    def found(step: TrainingStep, batch: Batch) -> int:
        assert search(step, batch) == len(batch.tokens)
        return size

    search = micro_batch._upwards
    monkeypatch.setitem(micro_batch._FINDERS, "cpu", found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_the_one_with_the_number_and_resumes_with_it(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def recipe(size: int | str) -> Recipe:
        fields = make_recipe(keep=3, dtype=dtype, micro_batch_size=size).to_dict()
        fields["model"]["embedding"] = {"dropout": 0.2}  # the search draws from a stream too
        return Recipe.from_dict(fields)

    train(recipe(2), tmp_path / "number")
    answer(monkeypatch, 2)
    train(recipe("auto"), tmp_path / "auto")
    assert_same_run(tmp_path / "number", tmp_path / "auto")
    shutil.copytree(tmp_path / "auto", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    monkeypatch.setitem(micro_batch._FINDERS, "cpu", lambda *_: pytest.fail("searched again"))
    train(recipe("auto"), tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "number", tmp_path / "resumed")
    starts = [e for e in read_metrics(tmp_path / "resumed/metrics.jsonl") if e["kind"] == "start"]
    assert [start["micro_batch_size"] for start in starts] == [2, 2]


def test_an_estimate_tries_it_too(make_recipe) -> None:
    assert estimate(make_recipe(micro_batch_size="auto"))["seconds_from"] == "steps"
