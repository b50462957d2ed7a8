"""`train.minutes`: the number of steps of a run that is to take so long.

It is determined once, when the run begins, by steps that are timed and then forgotten: training
starts after them, from its first weights. The run's recipe holds the number as `train.steps`, in
place of `train.minutes`. So the schedule knows its end, the run has the same bits as a run of a
recipe with these steps, and it is resumed like any other.
"""

import time
from collections.abc import Callable
from itertools import count
from statistics import median

from workhorse.checkpoints import RunDirectory
from workhorse.errors import WorkhorseError
from workhorse.parallel.processes.world import World
from workhorse.train.loop import BatchSource
from workhorse.train.recipe.recipe import FORWARD_PASS, Recipe, TrainConfig
from workhorse.train.report.metrics import read_metrics
from workhorse.train.step.step import TrainingStep

TIMED, MOST_TIMED = 0.05, 30.0
"""Steps are timed for this part of a run's time, and for at most so many seconds."""
Tell = Callable[[str], object]


def settle(
    train: TrainConfig,
    step: TrainingStep,
    batches: BatchSource,
    world: World,
    *,
    held_out: float,
    tell: Tell,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainConfig:
    """The settings with `steps` in place of `minutes`, by timing steps; rank 0 decides.

    Args:
        train: has `minutes`.
        step: is of no use afterwards, since its optimizer has a state.
        batches: the batch of each step.
        world: the processes of the run.
        held_out: batches of the whole held-out text.
        tell: called with remarks.
        clock: seconds since any moment.
    """
    assert train.minutes is not None
    seconds = 60 * train.minutes
    tell(f"timing steps, to find how many take train.minutes={train.minutes:g}")
    began = clock()
    a_step = time_steps(step, batches, world, min(TIMED * seconds, MOST_TIMED), clock)
    steps = steps_within(train, seconds - (clock() - began), a_step, held_out=held_out)
    found = with_steps(train, world.most(steps if world.is_first else 0))
    tell(remark(train, found, a_step))
    return found


def after_timing(minutes: float) -> float:
    """The seconds of `minutes` that remain once steps have been timed."""
    return 60 * minutes - min(TIMED * 60 * minutes, MOST_TIMED)


def time_steps(
    step: TrainingStep,
    batches: BatchSource,
    world: World,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median seconds of training steps, timed until those of rank 0 add up to `seconds`.

    The first step waits for compilation and page faults, and does not count.
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
    """The number of steps that take so long with their validations, at least 1.

    Args:
        train: says how often and how much is validated.
        seconds: for all of them.
        step_seconds: of a training step.
        held_out: batches of the whole held-out text.
    """
    without = with_steps(train, int(seconds / step_seconds))
    every, rows = without.steps_between_validations, without.rows_in_validation
    batches = held_out if rows is None else min(held_out, rows / train.batch_size)
    validations = batches * FORWARD_PASS / every if every else 0.0  # in steps, for each step
    left = seconds / step_seconds - held_out * FORWARD_PASS  # after the last step
    return max(1, int(left / (1 + validations)))


def with_steps(train: TrainConfig, steps: int) -> TrainConfig:
    """The settings with `steps`, at least 1, of which a warm-up that is too long gets a tenth."""
    steps, schedule = max(1, steps), train.schedule
    if schedule.warmup_steps >= steps:
        schedule = schedule.replace(warmup_steps=steps // 10)
    return train.replace(steps=steps, minutes=None, schedule=schedule)


def remark(train: TrainConfig, found: TrainConfig, step_seconds: float) -> str:
    """What `minutes` came to, in one line."""
    warmup, shorter = train.schedule.warmup_steps, found.schedule.warmup_steps
    shortened = f", and its warm-up of {warmup} steps to {shorter}" if warmup != shorter else ""
    return (
        f"train.minutes={train.minutes:g} comes to train.steps={found.steps}, at "
        f"{step_seconds:.3g} s a step{shortened}"
    )


def as_begun(run: RunDirectory, recipe: Recipe) -> Recipe:
    """The recipe to resume a run with: its minutes become the steps that the run was begun with.

    Raises:
        WorkhorseError: the run was begun for another number of minutes, or for a number of steps.
    """
    if (minutes := recipe.train.minutes) is None:
        return recipe
    _, state = run.store().newest_state() or (0, {})
    own = Recipe.from_dict(state.get("recipe") or run.recipe())
    if (steps := own.train.steps) is None:  # it stopped before its steps were timed
        return recipe
    events = read_metrics(run.metrics_file)
    if not any(event.get("minutes") == minutes for event in events if event["kind"] == "start"):
        raise WorkhorseError(
            f"train.minutes={minutes:g} is for a run that begins, and {run.path} has "
            f"train.steps={steps}; set train.steps to change when it ends"
        )
    return recipe.replace(train=with_steps(recipe.train, steps).to_dict())
