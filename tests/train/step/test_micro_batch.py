"""`micro_batch_size: auto`: the size is determined before training and does not change results."""

import math
import mmap
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_run import assert_same_run
from workhorse.config.base import ConfigError
from workhorse.devices.memory import most_resident, resident
from workhorse.errors import WorkhorseError
from workhorse.memory import capacity
from workhorse.memory.capacity import (
    LONG,
    check_training,
    fit_micro_batch,
    largest_share,
    recordable,
    shares,
    step_bytes,
    usable,
)
from workhorse.memory.step_memory import PlannedStep
from workhorse.native import Operators
from workhorse.nn import Decoder
from workhorse.parallel.config import ParallelismConfig
from workhorse.run import estimate, train
from workhorse.train import Recipe, read_metrics
from workhorse.train.randomness import random_state
from workhorse.train.recipe.training import TrainConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = 32


def config(batch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(steps=100, batch_size=batch_size, seq_len=8, **changes)


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda: math.ceil(n_bytes))
    monkeypatch.setattr(capacity, "available", lambda device: math.ceil(n_bytes))


@pytest.mark.parametrize("room", [33, 32, 31, 16, 15, 9, 8, 4, 2.5, 1.5, 1, 0.5])
def test_the_largest_share_that_fits_is_found_among_few(room: float) -> None:
    asked = []

    def needed(rows: int) -> int:
        asked.append(rows)
        return 10 + 2 * rows

    fits = 2 ** math.floor(math.log2(room)) if room >= 1 else 0
    assert largest_share(needed, int(10 + 2 * room), ROWS) == min(fits, ROWS)
    assert asked[0] == ROWS
    assert len(asked) <= 4


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, [1]), (2, [2, 1]), (7, [7, 4, 2, 1]), (32, [32, 16, 8, 4, 2, 1])]
)
def test_shares_halve(rows: int, expected: list[int]) -> None:
    assert shares(rows) == expected


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_rows_are_those_whose_recorded_step_fits(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, device: torch.device
) -> None:
    given = config(256, micro_batch_size="auto", dtype="bfloat16")
    step = PlannedStep(decoder.config, given, device)

    def needed(rows: int) -> int:
        return step_bytes(step.with_train(micro_batch_size=rows))

    chosen = set()
    margin = 1 - usable(10**6, device) / 10**6
    for n_bytes in (needed(256), needed(256) / (1 - margin) + 2, needed(1) / (1 - margin) + 2):
        free(monkeypatch, n_bytes)
        room = usable(math.ceil(n_bytes), device)
        fitting = next(rows for rows in shares(256) if needed(rows) <= room)
        assert fit_micro_batch(step).train.micro_batch_size == fitting
        chosen.add(fitting)
    assert len(chosen) == 3


def test_scattered_tensors_are_left_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "resolve", lambda *_, **__: Operators())
    assert usable(1000, CPU) == 700
    assert usable(1000, CUDA) == 900


def test_a_number_stays(decoder: Decoder) -> None:
    for size in (3, None):
        given = config(8, micro_batch_size=size)
        step = PlannedStep(decoder.config, given, torch.device("mps"))
        assert fit_micro_batch(step) is step


def test_recording_draws_no_random_numbers(decoder: Decoder) -> None:
    before = random_state()
    fit_micro_batch(PlannedStep(decoder.config, config(8, micro_batch_size="auto"), CPU))
    assert random_state() == before


def test_what_cannot_be_recorded_is_bounded(decoder: Decoder) -> None:
    given = config(8, kernel="flex", dtype="float16", execution="compiled")
    flex = PlannedStep(decoder.config, given, CUDA)
    assert recordable(flex) == flex.with_train(dtype="float32")
    whole = step_bytes(PlannedStep(decoder.config, config(8, dtype="float32"), CUDA))
    copies = 2 * sum(parameter.numel() for parameter in decoder.parameters())
    assert step_bytes(flex) == whole + copies


def test_no_room_for_one_row(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    free(monkeypatch, 2**10)
    message = (
        r"^one sequence of 8 tokens needs .* MiB, but a step may use .* MiB of the 0\.0 MiB free "
        r"on cpu; reduce train.seq_len, set "
    )
    with pytest.raises(WorkhorseError, match=message):
        fit_micro_batch(PlannedStep(decoder.config, config(8, micro_batch_size="auto"), CPU))


def test_other_devices_are_refused(decoder: Decoder) -> None:
    with pytest.raises(WorkhorseError, match="auto is not supported on device=mps, only on cuda a"):
        fit_micro_batch(
            PlannedStep(decoder.config, config(8, micro_batch_size="auto"), torch.device("mps"))
        )


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size"):
        config(8, micro_batch_size="most")


def test_a_long_run_is_refused_if_a_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    """Recording takes a second, so for a short run only weights, gradients and optimizer count."""
    short = PlannedStep(decoder.config, config(8), CPU)
    needed = step_bytes(short)
    monkeypatch.setattr("workhorse.devices.memory.available", lambda device, root: needed - 1)
    check_training(short)
    long = short.with_train(steps=int(LONG))
    with pytest.raises(WorkhorseError, match="a micro-batch of 8 sequences of 8 tokens needs"):
        check_training(long)
    monkeypatch.setattr("workhorse.devices.memory.available", lambda device, root: needed)
    check_training(long)
    monkeypatch.setattr("workhorse.devices.memory.available", lambda device, root: 100)
    with pytest.raises(
        WorkhorseError, match="the model with its gradients and optimizer state needs"
    ):
        check_training(short)


def test_processes_of_one_machine_need_room_for_all(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    """Every process needs memory for its shard of the weights."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    quarters = PlannedStep(decoder.config, config(8), CPU, ParallelismConfig(shard=4))
    needed = step_bytes(quarters)
    assert needed < step_bytes(PlannedStep(decoder.config, config(8), CPU))
    long = quarters.with_train(steps=int(LONG))
    monkeypatch.setattr("workhorse.devices.memory.available", lambda device, root: 4 * needed)
    check_training(long)
    monkeypatch.setattr("workhorse.devices.memory.available", lambda device, root: 4 * needed - 1)
    with pytest.raises(WorkhorseError, match="of 2 sequences of 8 tokens in 4 processes needs"):
        check_training(long)


def test_what_a_process_takes_is_measured() -> None:
    start = resident()
    assert most_resident() - start < 2**23
    size = 2**24 + 2**20  # Linux counts pages in batches per CPU, so the last ones are counted late
    with mmap.mmap(-1, size) as taken:  # memory that the heap has not used before
        for page in range(0, size, mmap.PAGESIZE):
            taken[page] = 1
    assert most_resident() - start >= 2**24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_the_one_with_the_number_and_resumes_with_it(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def recipe(size: int | str) -> Recipe:
        fields = make_recipe(keep=3, dtype=dtype, micro_batch_size=size).to_dict()
        fields["model"]["embedding"] = {"dropout": 0.2}
        return Recipe.from_dict(fields)

    def answer(step: PlannedStep) -> PlannedStep:
        size = fit_micro_batch(step).train.micro_batch_size
        assert size == (2 if step.train.micro_batch_size == 2 else 4)
        return step.with_train(micro_batch_size=2)

    train(recipe(2), tmp_path / "number")
    monkeypatch.setattr("workhorse.run.plan.fit_micro_batch", answer)
    train(recipe("auto"), tmp_path / "auto")
    assert_same_run(tmp_path / "number", tmp_path / "auto")
    shutil.copytree(tmp_path / "auto", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    monkeypatch.setattr(capacity, "step_bytes", lambda *_, **__: pytest.fail("asked again"))
    train(recipe("auto"), tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "number", tmp_path / "resumed")
    starts = [e for e in read_metrics(tmp_path / "resumed/metrics.jsonl") if e["kind"] == "start"]
    assert [start["micro_batch_size"] for start in starts] == [2, 2]


def test_an_estimate_determines_it_too(make_recipe) -> None:
    assert estimate(make_recipe(micro_batch_size="auto"))["micro_batch_size"] == 4
