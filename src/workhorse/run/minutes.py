"""`train.minutes`: find the number of steps that a run can do in a given time.

The number is determined once, when the run begins, by timing steps whose results are discarded.
Training then starts from the initial weights. The run's recipe stores the number as `train.steps`,
in place of `train.minutes`. The run is bitwise equal to a run of a recipe with this number. If the
recipe has `train.steps` too, the number is not larger.
"""

import sys
import time
from collections.abc import Callable
from itertools import count
from statistics import median

from workhorse.checkpoints import RunDirectory
from workhorse.data import Batches
from workhorse.errors import WorkhorseError
from workhorse.parallel.processes.world import World
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.recipe.training import FORWARD_PASS, TrainConfig
from workhorse.train.report.metrics import read_metrics
from workhorse.train.step.step import TrainingStep

TIMED, MOST_TIMED, MOST_TIMED_OF_STEPS = 0.05, 30.0, 5.0
"""Steps are timed for the fraction `TIMED` of a run's time, up to `MOST_TIMED` seconds, or up to
`MOST_TIMED_OF_STEPS` seconds if the recipe has `train.steps` too."""
Notify = Callable[[str], object]


def settle(
    train: TrainConfig,
    step: TrainingStep,
    batches: Batches,
    world: World,
    *,
    held_out: float,
    notify: Notify,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainConfig:
    """Time training steps and replace `minutes` by the number of steps that takes this time.

    All ranks get the number of rank 0. `held_out` is the number of batches in the validation split.
    Do not use `step` afterwards: its weights and optimizer state have changed.
    """
    assert train.minutes is not None
    seconds = 60 * train.minutes
    notify(f"timing steps to find the number that takes train.minutes={train.minutes:g}")
    began = clock()
    a_step = time_steps(step, batches, world, timed(train), clock)
    steps = steps_within(train, seconds - (clock() - began), a_step, held_out=held_out)
    found = with_steps(train, world.most(steps if world.is_first else 0))
    notify(remark(train, found, a_step))
    return found


def timed(train: TrainConfig) -> float:
    """Return the seconds for which steps are timed."""
    assert train.minutes is not None
    most = MOST_TIMED if train.steps is None else MOST_TIMED_OF_STEPS
    return min(TIMED * 60 * train.minutes, most)


def time_steps(
    step: TrainingStep,
    batches: Batches,
    world: World,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median seconds of a training step, timed for `seconds` by rank 0's clock.

    The first step does not count, because it waits for compilation and page faults.
    """
    times: list[float] = []
    for number in count():
        start = clock()
        step.update(*step.backward(batches[number], number), schedule=0.0)
        if number > 0:
            times.append(clock() - start)
        if world.most(world.is_first and number > 0 and sum(times) >= seconds):
            return median(times)
    raise AssertionError


def steps_within(
    train: TrainConfig, seconds: float, step_seconds: float, *, held_out: float = 0
) -> int:
    """Return the number of steps, with their validations, that fit into `seconds`, at least 1.

    It is at most `train.steps`, if set. `step_seconds` is the time of a training step, `held_out`
    the number of batches in the validation split.
    """
    without = with_steps(train, int(seconds / step_seconds))
    every, rows = without.steps_between_validations, without.rows_in_validation
    batches = held_out if rows is None else min(held_out, rows / train.batch_size)
    validations = batches * FORWARD_PASS / every if every else 0.0  # cost per step, in steps
    left = seconds / step_seconds - held_out * FORWARD_PASS  # without the final validation
    return max(1, min(int(left / (1 + validations)), train.steps or sys.maxsize))


def with_steps(train: TrainConfig, steps: int) -> TrainConfig:
    """Set `steps`, at least 1. A warm-up that is not shorter is set to a tenth of the steps."""
    steps, schedule = max(1, steps), train.schedule
    if schedule.warmup_steps >= steps:
        schedule = schedule.replace(warmup_steps=steps // 10)
    return train.replace(steps=steps, minutes=None, schedule=schedule)


def remark(train: TrainConfig, found: TrainConfig, step_seconds: float) -> str:
    """Return a log line with the number of steps that `train.minutes` gives."""
    warmup, shorter = train.schedule.warmup_steps, found.schedule.warmup_steps
    shortened = f"; warmup_steps={shorter} instead of {warmup}" if warmup != shorter else ""
    whole = (train.steps or 0) * step_seconds / 60
    of_all = f"; train.steps={train.steps} would take {whole:.1f} minutes" if train.steps else ""
    return (
        f"train.minutes={train.minutes:g} gives train.steps={found.steps} at {step_seconds:.3g} s "
        f"per step{of_all}{shortened}"
    )


def as_begun(run: RunDirectory, recipe: Recipe) -> Recipe:
    """For resuming a run, replace `train.minutes` of its recipe by the run's number of steps.

    Raises:
        WorkhorseError: the run was started with other minutes, or with a number of steps.
    """
    if (minutes := recipe.train.minutes) is None:
        return recipe
    _, state = run.store().newest_state() or (0, {})
    own = Recipe.from_dict(state.get("recipe") or run.recipe())
    if own.train.minutes is not None:  # the run stopped before its steps were timed
        return recipe
    steps = own.train.length
    events = read_metrics(run.metrics_file)
    if not any(event.get("minutes") == minutes for event in events if event["kind"] == "start"):
        raise WorkhorseError(
            f"train.minutes={minutes:g} applies only to a new run, but {run.path} already has "
            f"train.steps={steps}; set train.steps to change when it ends"
        )
    return recipe.replace(train=with_steps(recipe.train, steps).to_dict())
