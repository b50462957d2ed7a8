"""`train`: from a recipe to a trained model in a run directory."""

import contextlib
import gc
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.runs.store import CheckpointStore
from workhorse.data.sources import check_outside
from workhorse.errors import WorkhorseError
from workhorse.files.writing import TAKES_NO_MORE, refusal
from workhorse.models.describe import count_parameters
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.processes.group import Group, watchdog
from workhorse.parallel.processes.world import World, join_processes
from workhorse.run.build import build_loop, build_run
from workhorse.run.check import check_recipe, recipe_warnings
from workhorse.run.minutes import as_begun
from workhorse.run.plan import RunPlan, plan_run
from workhorse.run.resume import Resumption, before_jump, plan_resumption
from workhorse.train.loop import Loop, StopSignals
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.report.metrics import Event, read_metrics
from workhorse.train.report.page import write_report


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run."""

    run_directory: Path
    step: int
    """Number of steps done."""
    steps: int
    """Number of steps in the recipe."""
    parameters: int
    loss: float | None
    """Training loss of the last step logged, nats per token."""
    validation_loss: float | None
    """Loss of the last validation, nats per token; None without validation data."""
    figures: dict[str, float]
    """The objective's `headline` of the last validation, or without one of the last step logged."""
    validated_at: int | None
    """The step of the last validation."""
    bits_per_byte: float | None
    """Bits per byte of the last validation; see `Validation`."""
    unknown_rate: float | None
    """Fraction of the held-out tokens that are unknown; see `Validation`."""
    tokens: int
    """Number of predicted tokens trained on."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite."""
    seconds: float
    """Time in the training loop over all sessions, including validation and checkpoints."""
    stopped_by: str | None
    """The name of the signal that stopped the run; None if it ran to its end."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    settings: Sequence[str] = (),
    on_event: Callable[[Event], None] = lambda event: None,
    store: CheckpointStore | None = None,
    signals: StopSignals | None = None,
) -> TrainResult:
    """Train a recipe's model, or continue training it.

    Args:
        recipe: everything that determines the run.
        out: the run directory: new or empty, or with `resume` the directory of the run to continue.
        resume: True to continue the run in `out` from its newest intact checkpoint. Changes of the
            recipe are recorded in `metrics.jsonl`, or raise an error; see `workhorse.config.base`.
        settings: the command line's overrides, such as `train.steps=50`. They are already in the
            recipe and only shown in the report.
        on_event: called with every event of `metrics.jsonl` (`workhorse.train.report.metrics`), and
            with two more kinds: `notice` (`message`) and `data` (`done` and `total` bytes, total
            None while unknown).
        store: the checkpoint store; None for the one in the run directory.
        signals: signals that stop training after the current step, with a checkpoint. The result
            names the signal. A second signal takes effect at once. None: no signal is handled, so
            Ctrl-C raises KeyboardInterrupt and no checkpoint is saved.

    Raises:
        WorkhorseError: the recipe cannot be run here, the data cannot be read, the run directory
            is taken, the recipe does not fit the run to resume, the disk is full, or the loss is
            not finite for too many steps. A run that fails before its first step leaves nothing
            behind, and one that fails in it only the tokenized data, so that the same call starts
            it again. A resume that fails a check changes nothing.
    """
    run = RunDirectory(out)
    with join_processes() as group:
        return _train(
            recipe,
            run,
            group,
            resume,
            settings=settings,
            on_event=on_event,
            store=store,
            signals=signals or StopSignals(()),
        )


def _train(
    recipe: Recipe,
    run: RunDirectory,
    group: Group,
    resume: bool,
    *,
    settings: Sequence[str],
    on_event: Callable[[Event], None],
    store: CheckpointStore | None,
    signals: StopSignals,
) -> TrainResult:
    resume = bool(group.most(resume))  # all ranks resume if one does
    with group.first_before_others():
        if group.is_first:
            _check_place(run, resume)  # before the lock, which creates a file in the folder
        device = check_recipe(recipe, resume=resume)
        _check_processes(recipe, group.size)
        check_outside(recipe.data, run.path)
    parallel = recipe.parallel
    world = World(group.rank, group.size, parallel)
    lock = run.lock() if world.is_first else contextlib.nullcontext()
    with lock, _naming(run):
        into = store or run.store(recipe.train.keep)
        if resume:
            asked, recipe = recipe.train.steps, as_begun(run, recipe)
            if asked not in (None, recipe.train.steps):
                line = (
                    f"train.steps={asked} is not used, because train.minutes gave this run "
                    f"{recipe.train.steps} steps; to change them, set train.steps without minutes"
                )
                on_event({"kind": "notice", "message": line})
            resumed = plan_resumption(run, recipe, into.newest)
        else:
            resumed = Resumption(notices=recipe_warnings(recipe))
        for line in resumed.notices:
            on_event({"kind": "notice", "message": line})
        fresh = world.is_first and not resume
        if fresh:
            run.begin(recipe.to_yaml())
        planned = partial(plan_run, run=run, device=device, world=world, on_event=on_event)
        loop: Loop | None = None
        try:
            recipe, loop = _begin(planned(recipe, at=resumed), into, settings)
            ended = _get_through(loop, signals, parallel.patience)
        except Exception:  # such as out of memory; a run without a step is not worth keeping
            if fresh and (loop is None or loop.counters.step == 0):
                run.undo(keep_data=loop is not None)
            raise
        while not ended:
            jumped = loop.counters
            at = before_jump(into.newest, recipe, jumped)
            del loop  # frees its memory before the model is built again
            gc.collect()
            _, loop = _begin(planned(recipe, at=at), into, settings)
            rows = at.rows - at.state["counters"]["rows"]
            line = (
                f"loss spike at step {jumped.step:,}: resuming from step {at.step:,} and skipping "
                f"{rows:,} rows"
            )
            loop.notify("back", jumped=jumped.step, rows=rows, message=line)
            ended = _get_through(loop, signals, parallel.patience)
        with world.first_before_others():
            if world.is_first:
                write_report([run])
            return _result(loop, run, signals)


def _begin(plan: RunPlan, store: CheckpointStore, settings: Sequence[str]) -> tuple[Recipe, Loop]:
    """Build the loop of a plan; return it with its recipe, which has steps instead of minutes."""
    plan, parts = build_run(plan)
    return plan.recipe, build_loop(plan, parts, store, settings)


def _get_through(loop: Loop, signals: StopSignals, patience: float) -> bool:
    """Run a loop; return True at its end or after a signal, False after a loss spike."""
    try:
        with signals, watchdog(loop.world, patience) as progress:
            return loop.run(signals, progress)
    finally:
        loop.metrics.close()


@contextlib.contextmanager
def _naming(run: RunDirectory) -> Generator[None]:
    """Context manager that adds the run directory and a remedy to errors such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in TAKES_NO_MORE:
            raise
        reason, remedy = refusal(error)
        following = ", then continue with --resume" if run.exists else ""
        raise WorkhorseError(
            f"cannot write to {run.path}: {reason}; {remedy}{following}"
        ) from error


def _check_processes(recipe: Recipe, size: int) -> None:
    asked = recipe.parallel.processes
    if asked != size:
        there = "only 1 is running" if size == 1 else f"{size} are running"
        raise WorkhorseError(
            f"parallel needs {asked} processes, but {there}; start {asked} with workhorse train "
            f"--workers {asked} or torchrun, or set {_named(recipe.parallel)}"
        )


def _named(parallel: ParallelismConfig) -> str:
    """Return the settings that reduce `parallel` to one process."""
    several = [f"parallel.{name}=1" for name, ways in parallel.ways.items() if ways > 1]
    return " ".join(several) or "parallel.data=1"


def check_run(recipe: Recipe, out: str | Path, *, resume: bool = False) -> Resumption:
    """Run the checks of `train` on a recipe and a run directory. Writes nothing.

    Returns:
        The step where the run would continue, and the changes of its recipe. A new run has step 0
        and no changes.

    Raises:
        WorkhorseError: the run directory is taken, or the run cannot be resumed.
    """
    run = RunDirectory(out)
    _check_place(run, resume)
    check_recipe(recipe, resume=resume)
    check_outside(recipe.data, run.path)
    return (
        plan_resumption(run, as_begun(run, recipe))
        if resume
        else Resumption(notices=recipe_warnings(recipe))
    )


def reason_not_free(out: str | Path) -> str:
    """Return one line that says why no run can start in a directory; empty if one can."""
    try:
        RunDirectory(out).check_free()
    except WorkhorseError as error:
        return str(error)
    return ""


def _check_place(run: RunDirectory, resume: bool) -> None:
    if not resume:
        run.check_free()
    elif not run.exists:
        remedy = "omit --resume to start one"
        if run.checkpoints_folder.exists():
            remedy = f"restore its {run.recipe_file.name}, which is missing"
        raise WorkhorseError(f"{run.path} contains no run to resume; {remedy}")


def _result(loop: Loop, run: RunDirectory, signals: StopSignals) -> TrainResult:
    events = {
        event["kind"]: event for event in read_metrics(run.metrics_file)
    }  # the last event of each kind
    validation = events.get("validation", {})
    measured = validation or events.get("step", {})
    return TrainResult(
        run_directory=run.path,
        step=loop.counters.step,
        steps=loop.config.length,
        parameters=count_parameters(run.config)["total"],
        loss=events.get("step", {}).get("loss"),
        validation_loss=validation.get("loss"),
        figures={
            name: measured[name]
            for name in loop.config.objective.headline
            if measured.get(name) is not None
        },
        validated_at=validation.get("step"),
        bits_per_byte=validation.get("bits_per_byte"),
        unknown_rate=validation.get("unknown_rate"),
        tokens=loop.counters.tokens,
        skipped_steps=loop.counters.skipped_steps,
        seconds=loop.counters.seconds,
        stopped_by=signals.received.name if signals.received else None,
    )
