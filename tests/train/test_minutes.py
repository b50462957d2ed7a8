"""`train.minutes`: the run equals a run with the number of steps that was determined."""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import assert_same_run
from workhorse.checkpoints import RunDirectory
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.parallel.processes.world import ALONE
from workhorse.run import build, dry_run, estimate, train
from workhorse.run.minutes import settle, steps_within, time_steps, with_steps
from workhorse.train import Recipe, override_recipe
from workhorse.train.report.page import contents

LONGER = {"steps": None, "minutes": 1}


def clock_of(seconds: float) -> Callable[[], float]:
    """Return a clock that advances by `seconds` at each reading."""
    times = count()
    return lambda: seconds * next(times)


@pytest.fixture
def half_minute(make_recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with half a minute; a step takes a second and a half."""
    monkeypatch.setattr(build, "settle", partial(settle, clock=clock_of(1.5)))
    schedule = {"kind": "cosine", "warmup_steps": 30}
    return make_recipe(steps=None, minutes=0.5, schedule=schedule, checkpoint_every=4)


def test_it_is_bit_for_bit_the_run_with_these_steps(half_minute, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    result = train(half_minute, tmp_path / "minutes", on_event=told.append)
    run = RunDirectory(tmp_path / "minutes")
    own = Recipe.from_dict(run.recipe())
    assert 10 <= result.steps == own.train.steps == result.step <= 16
    assert own.train.minutes is None
    assert own.train.schedule.warmup_steps == result.steps // 10
    assert any(
        event["message"].startswith(
            f"train.minutes=0.5 gives train.steps={result.steps} at 1.5 s per step; warmup_steps="
        )
        for event in told
        if event["kind"] == "notice"
    )
    (start,) = (event for event in told if event["kind"] == "start")
    assert (start["steps"], start["minutes"]) == (result.steps, 0.5)
    figures = dict(contents(run)["figures"])
    assert figures["total time of train.minutes"].endswith(" s of 30 s")
    train(own, tmp_path / "steps")
    assert_same_run(tmp_path / "minutes", tmp_path / "steps", step=result.steps)


def test_a_resumed_run_keeps_its_steps(half_minute, tmp_path: Path) -> None:
    steps = train(half_minute, tmp_path / "run").steps
    assert train(half_minute, tmp_path / "run", resume=True).steps == steps
    assert dry_run(half_minute, tmp_path / "run", resume=True)["seconds"] == 0
    other = half_minute.replace(train=half_minute.train.replace(minutes=2).to_dict())
    said = f"train.minutes=2 applies only to a new run, but .*train.steps={steps}; set train.steps"
    with pytest.raises(WorkhorseError, match=said):
        train(other, tmp_path / "run", resume=True)
    longer = half_minute.replace(train=half_minute.train.replace(steps=steps + 90).to_dict())
    told: list[dict[str, Any]] = []
    assert train(longer, tmp_path / "run", resume=True, on_event=told.append).steps == steps
    said = (
        f"train.steps={steps + 90} is not used, because train.minutes gave this run {steps} steps"
    )
    assert any(said in event.get("message", "") for event in told)


def test_a_run_that_stopped_before_its_steps_were_timed_times_them(
    half_minute, tmp_path: Path
) -> None:
    RunDirectory(tmp_path / "run").path.mkdir()
    RunDirectory(tmp_path / "run").begin(half_minute.to_yaml())
    result = train(half_minute, tmp_path / "run", resume=True)
    assert result.step == result.steps == RunDirectory(tmp_path / "run").recipe()["train"]["steps"]


def test_validations_are_part_of_the_time(make_recipe) -> None:
    config = make_recipe(**LONGER, eval_every=20, eval_batches=6).train
    assert steps_within(config, 60, 0.5, held_out=0) == 120
    # 6 batches every 20 steps cost a tenth of the time of 20 steps; the last validation costs 10.
    assert steps_within(config, 60, 0.5, held_out=30) == int(110 / 1.1)
    assert steps_within(config, -1, 0.5) == 1  # even without time left


class Step:
    """A step that counts its updates."""

    done = 0

    def backward(self, batch: int, number: int) -> tuple[int, int]:
        return batch, number

    def update(self, *_: int, schedule: float) -> None:
        self.done += 1


def test_steps_are_timed_until_they_add_up_and_the_first_does_not_count() -> None:
    step: Any = Step()
    batches: Any = range(100)
    assert time_steps(step, batches, ALONE, 5, clock_of(2)) == 2
    assert step.done == 1 + 3


def test_the_first_process_decides(make_recipe) -> None:
    """Another rank stops timing when rank 0 does, and uses its number of steps."""

    class Second:
        is_first = False
        of_first = iter([0, 0, 1, 77])

        def most(self, own: int) -> int:
            return max(own, next(self.of_first))

    step: Any = Step()
    world: Any = Second()
    batches: Any = range(100)
    config = make_recipe(**LONGER).train
    told = {"held_out": 0, "notify": lambda line: None, "clock": clock_of(1e-3)}
    assert settle(config, step, batches, world, **told).steps == 77
    assert step.done == 3


def test_a_dry_run_says_what_minutes_mean_here(
    make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("workhorse.run.dry_run")
    monkeypatch.setattr(module, "time_steps", lambda *_, **__: 1.5)
    found = estimate(make_recipe(**LONGER))
    assert (found["steps"], found["tokens"], found["seconds"]) == (38, 38 * 4 * 16, 57)


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf"), 1e9, "text", True])
def test_minutes_that_are_none_are_refused_in_one_line(make_recipe, minutes: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.minutes") as error:
        make_recipe(steps=None, minutes=minutes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("steps", "found", "said"),
    [
        (6, 6, "gives train.steps=6 at 1.5 s per step; train.steps=6 would take 0.1 minutes"),
        (
            900,
            12,
            "gives train.steps=12 at 1.5 s per step; train.steps=900 would take 22.5 minutes",
        ),
    ],
)
def test_with_steps_minutes_are_a_maximum(
    steps: int, found: int, said: str, half_minute, tmp_path: Path
) -> None:
    bounded = half_minute.train.replace(steps=steps, schedule={"kind": "cosine", "warmup_steps": 2})
    recipe = half_minute.replace(train=bounded.to_dict())
    told: list[str] = []
    result = train(recipe, tmp_path / "run", on_event=lambda one: told.append(str(one)))
    assert result.step == result.steps == found
    assert any(said in one for one in told)
    assert train(recipe, tmp_path / "run", resume=True).steps == found


def test_a_bounded_run_that_stopped_before_its_steps_were_timed_times_them(
    half_minute, tmp_path: Path
) -> None:
    recipe = half_minute.replace(train=half_minute.train.replace(steps=900).to_dict())
    RunDirectory(tmp_path / "run").path.mkdir()
    RunDirectory(tmp_path / "run").begin(recipe.to_yaml())
    assert train(recipe, tmp_path / "run", resume=True).step < 20


@pytest.mark.parametrize(
    ("written", "setting", "left"),
    [
        ({"steps": 9}, "train.minutes=2", {"minutes": 2}),
        ({"minutes": 2}, "train.steps=9", {"steps": 9}),
        ({"steps": 9}, "train.minutes=null", {"steps": 9, "minutes": None}),
    ],
)
def test_a_setting_takes_the_place_of_the_recipes_other(
    written: dict[str, Any], setting: str, left: dict[str, Any]
) -> None:
    said: list[str] = []
    assert override_recipe({"train": written}, [setting], said.append)["train"] == left
    taken = [f"{setting} replaces train.{key}={value}" for key, value in written.items()]
    assert said == (taken if len(left) == 1 else [])


def test_a_warm_up_that_would_not_end_is_shortened(make_recipe) -> None:
    config = make_recipe(**LONGER, schedule={"kind": "linear", "warmup_steps": 50}).train
    assert with_steps(config, 51).schedule.warmup_steps == 50
    assert with_steps(config, 50).schedule.warmup_steps == 5
