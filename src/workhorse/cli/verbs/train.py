"""`workhorse train`: train a model from a recipe into a run directory."""

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from workhorse.cli.loading import PATH, json_option, recipe_of_run, runtime_options, train_settings
from workhorse.cli.output import ExitCode, next_command, print_result
from workhorse.errors import WorkhorseError, counted
from workhorse.parallel.processes import environment

MOST_WORKERS = 4096
"""Maximum number of worker processes on one machine."""

GIVEN = "workhorse.arguments"
"""Key under which click's context stores the arguments that were given to the verb."""


class _Train(click.Command):
    """A click command that, for an unknown option, suggests the recipe setting with that name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        ctx.meta[GIVEN] = given
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not (settings := _as_settings(error.option_name, given)):
                raise
            raise click.UsageError(
                f"no such option {error.option_name}; write the recipe's setting {settings}", ctx
            ) from None


def _as_settings(option: str, given: list[str]) -> str:
    """The recipe settings for an unknown option: `train.steps=10` for `--steps 10`.

    Empty if a recipe has no key of that name. `given` has all arguments of the verb.
    """
    from workhorse.train.recipe.keys import listed, places_of
    from workhorse.train.recipe.recipe import Recipe

    at = next((n for n, word in enumerate(given) if word.partition("=")[0] == option), len(given))
    _, equals, value = given[at].partition("=") if at < len(given) else ("", "", "")
    if not equals:
        value = next(iter(given[at + 1 :]), "")
    value = "..." if value.startswith("-") or not value else value
    places = places_of(Recipe, option.lstrip("-").replace("-", "_"))
    return listed([f"{place}={value}" for place in places]) if places else ""


@click.command("train", cls=_Train)
@click.argument("recipe", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", type=PATH, help="Run directory.  [default: runs/NAME]")
@click.option("--resume", is_flag=True, help="Resume from the newest complete checkpoint.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show size, memory and time, and with --resume the changed settings; write nothing.",
)
@click.option(
    "--show-recipe",
    is_flag=True,
    help="With --dry-run: also show the complete recipe, with all defaults and all model settings.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=MOST_WORKERS),
    help="Number of processes on this machine; they split every batch (parallel.data).",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --workers: number of times to restart all workers and resume after a failure.",
)
@partial(runtime_options, default="the recipe's")
@json_option
def command(
    *,
    recipe: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    resume: bool,
    dry_run: bool,
    show_recipe: bool,
    workers: int | None,
    max_restarts: int,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Train a model from RECIPE: a YAML file, depth-N, or a run directory to use its recipe.

    depth-1 to depth-64 are built-in recipes of one family, sized by the number of layers.
    `workhorse recipe` lists the keys of a recipe.

    Settings after RECIPE override it, as in `train.steps=500 model.d_model=256`. --device, --dtype
    and --threads override the same keys of its `train` section. An interrupt, SIGTERM or SIGHUP
    stops the run after the current step and saves a checkpoint. --resume continues the run;
    `workhorse recipe` shows the settings that may then change.
    """
    if show_recipe and not dry_run:
        raise click.UsageError("--show-recipe only applies to --dry-run; remove it")
    if recipe.is_dir():
        recipe, out = _own_recipe(recipe, out, resume)
    notices: list[str] = []
    changes = [*overrides, *train_settings(device=device, dtype=dtype, threads=threads)]
    if max_restarts and (workers or 1) == 1:
        raise click.UsageError("--max-restarts needs --workers of 2 or more; add --workers")
    workers = workers or (environment.count() if environment.count() > 1 else None)
    goes_on = resume or environment.attempt() > 0
    settings = _read(recipe, changes, out, resume=goes_on, workers=workers, notify=notices.append)
    if again := environment.attempt():
        notices.append(f"restart {again} of all processes, because one had failed")
    if workers is not None:
        changes.append(f"parallel.data={settings.parallel.data}")
    if dry_run:
        _dry_run(settings, out, resume, as_json, notices, show_recipe=show_recipe)
    elif (workers or 1) > 1 and environment.count() == 1:
        from workhorse.parallel.processes.launch import launch

        if not resume:
            # Checked before the launch: a restarted worker would resume a run it did not start.
            from workhorse.checkpoints import RunDirectory

            RunDirectory(out or _default(settings.name)).check_free()
        context = click.get_current_context()
        context.exit(launch(["train", *context.meta[GIVEN]], workers or 1, max_restarts))
    else:
        place = out or _default(settings.name)
        resume = resume or (goes_on and _has_begun(place))
        _train(settings, place, resume, as_json, notices=notices, changes=changes)


def _has_begun(run: Path) -> bool:
    """True if the run was created after the launcher (PyTorch's elastic agent) started.

    A restarted worker resumes a run of this launch, but not an older run.
    """
    from workhorse.checkpoints import RunDirectory

    made = RunDirectory(run)
    return made.exists and made.recipe_file.stat().st_mtime >= environment.agent_began()


def _own_recipe(folder: Path, out: Path | None, resume: bool) -> tuple[Path, Path]:
    """For a run directory given as RECIPE: the path of its recipe, and the folder to train in."""
    recipe = recipe_of_run(folder)
    if not resume and out is None:
        raise WorkhorseError(
            f"{folder} is already a run; continue it with --resume, or start a new run from its "
            "recipe with --out"
        )
    return recipe, out or folder


def _read(
    file: Path,
    overrides: list[str],
    out: Path | None,
    *,
    resume: bool,
    workers: int | None,
    notify: Callable[[str], object],
) -> Any:
    """Read a recipe and apply overrides to it.

    With `resume`, the model that the run was initialized from is not needed. `parallel.data` is
    adapted to `workers`, the number of processes, unless it is None.
    """
    from workhorse.models import preset_names
    from workhorse.train.recipe.depth import read_recipe

    if str(file) in preset_names() and not file.exists():
        raise WorkhorseError(
            f"{file} is a preset, not a recipe; write a recipe with model: {{preset: {file}}}, "
            "or give depth-N"
        )
    written = read_recipe(file)  # first: an invalid file fails before torch is imported
    from workhorse.checkpoints import RunDirectory
    from workhorse.run import resumed_recipe
    from workhorse.train import Recipe, on_workers, override_recipe, with_init

    fields = override_recipe(written, overrides, notify)
    if resume and (run := RunDirectory(out or _default(fields.get("name")))).exists:
        fields = resumed_recipe(fields, run)
    if workers is not None:
        said = any(one.startswith("parallel.data=") for one in overrides)
        fields = on_workers(fields, workers, data_is_given=said)
    return Recipe.from_dict(with_init(fields))


def _default(name: object) -> Path:
    return Path("runs") / str(name)


def _train(
    settings: Any, out: Path, resume: bool, as_json: bool, *, notices: list[str], changes: list[str]
) -> None:
    from workhorse.cli.train_progress import show_training
    from workhorse.devices.names import resolve_device
    from workhorse.native.allocator import keep_freed_memory
    from workhorse.parallel.processes.world import LostError, ReportedError
    from workhorse.run import train
    from workhorse.train import StopSignals

    device = resolve_device(settings.train.device)
    begin = partial(train, settings, out, resume=resume, settings=changes, signals=StopSignals())
    if environment.rank():
        try:
            with keep_freed_memory(device):
                begin()
        except LostError:  # rank 0, or the process that exited, reports the reason
            click.get_current_context().exit(ExitCode.USAGE)
        return
    with show_training(settings.train.steps, settings.train.objective.headline) as show:
        for line in notices:
            show({"kind": "notice", "message": line})
        try:
            with keep_freed_memory(device):
                result = begin(on_event=show)
        except ReportedError:
            click.get_current_context().exit(ExitCode.USAGE)
    print_result(result.to_dict(), as_json, text=_summary(result))
    if result.stopped_by is not None:
        click.get_current_context().exit(ExitCode.after(result.stopped_by))


def _summary(result: Any) -> str:
    from workhorse.checkpoints.stored import TrainedModel
    from workhorse.cli.train_progress import bits_per_byte, headlines
    from workhorse.model.load import is_trained_to_chat
    from workhorse.train.report.page import duration

    run = str(result.run_directory)
    stored = TrainedModel(result.run_directory)
    chats = is_trained_to_chat(stored, stored.tokenizer())
    words = ["chat", run] if chats else ["generate", run, "--prompt", "TEXT"]
    following = next_command(*words)
    lines = [f"{run}: step {result.step:,} of {result.steps:,}"]
    if result.stopped_by is not None:
        lines[0] += f", stopped by {result.stopped_by} and saved"
        words = ["train", run, "--resume", *environment.workers()]
        following = f"resume with workhorse {shlex.join(words)}"
    if found := headlines(result.figures, [*result.figures]):
        at = result.step if result.validated_at is None else result.validated_at
        of = "training" if result.validated_at is None else "validation"
        line = f"{of} {found}" + (f" at step {at:,}" if at != result.step else "")
        if result.bits_per_byte is not None:
            line += f", {bits_per_byte(result.bits_per_byte, result.unknown_rate)}"
        lines.append(line)
    lines.append(f"{result.tokens:,} tokens in {duration(result.seconds)}, validation included")
    if result.skipped_steps:
        skipped = counted(result.skipped_steps, "step")
        lines.append(f"{skipped} skipped: loss or gradient was not finite")
    lines.append(f"report {result.run_directory / 'report.html'}; {following}")
    return "\n".join(lines)


def _dry_run(
    settings: Any,
    out: Path | None,
    resume: bool,
    as_json: bool,
    notices: list[str],
    *,
    show_recipe: bool,
) -> None:
    from workhorse.devices.names import resolve_device
    from workhorse.native.allocator import keep_freed_memory
    from workhorse.run import dry_run

    notify = partial(print, file=sys.stderr)
    for line in notices:
        notify(line)
    with keep_freed_memory(resolve_device(settings.train.device)):
        found = dry_run(settings, out, resume=resume, notify=notify)
    lines = _figures(found)
    if show_recipe:  # the figures as comments, so that the whole is a recipe
        lines = [settings.expanded().to_yaml(), *(f"# {line}" for line in lines)]
    print_result(found, as_json, text="\n".join(lines))


def _figures(found: dict[str, Any]) -> list[str]:
    """Format the result of a dry run: lines with parameters, memory, tokens, export and time."""
    from workhorse.cli.train_progress import duration
    from workhorse.devices.memory import size
    from workhorse.plan.page import step_lines

    parameters, memory = found["parameters"], found["memory"]
    roles = ", ".join(
        f"{name} {count:,}"
        for name, count in parameters.items()
        if name not in ("total", "active") or (name == "active" and count != parameters["total"])
    )
    most, *parts = step_lines(memory)
    if memory["fits"] is not None:
        fits = "fits" if memory["fits"] else "does not fit"
        each = f" for each of {found['processes']} processes" if found["processes"] > 1 else ""
        parts.append(f"{fits}: {size(memory['room'])} are free on {found['device']}{each}")
    basis = {
        "steps": "measured with a few steps on random tokens, plus validation and samples",
        "matrix product": "estimated from the peak matmul speed, so this is a lower bound",
    }[found["seconds_from"]]
    left = " left" if found.get("step") else ""
    minutes = found["recipe"]["train"]["minutes"]
    steps = f"at most {counted(found['steps'], 'step')} in train.minutes={minutes}"
    of_minutes = [f"steps       {steps}; validation reduces it, and train determines the count"]
    return [
        f"parameters  {parameters['total']:,} ({roles})",
        f"memory      {most}, {found['micro_batch_size']:,} rows at once",
        *(f"            {line}" for line in parts),
        *(of_minutes if minutes else []),
        f"tokens      {found['tokens']:,}",
        f"export      {found['exports_as']}",
        f"time        {duration(found['seconds'])}{left} on {found['device']}, {basis}",
    ]
