"""`workhorse compare`: run a study that compares designs with confidence intervals."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from workhorse.cli.loading import PATH, json_option, runtime_options, train_settings
from workhorse.cli.output import ExitCode, print_result, warn
from workhorse.errors import counted


@click.command("compare")
@click.argument("study", type=PATH)
@click.option("--out", type=PATH, help="Folder of the study.  [default: runs/NAME]")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of parallel trials, each in its own process with its share of the threads.",
)
@click.option(
    "--quick", is_flag=True, help="Run a short version, as the section quick of STUDY defines it."
)
@click.option("--dry-run", is_flag=True, help="Show the trials, sizes and time; train nothing.")
@partial(runtime_options, default="the recipe's")
@json_option
def command(
    *,
    study: Path,
    out: Path | None,
    jobs: int,
    quick: bool,
    dry_run: bool,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Train the variants of STUDY, a YAML file, at an equal budget and compare their losses.

    Each variant is trained with every seed of the study. An interrupt, SIGTERM or SIGHUP stops the
    study after the current step. The same command resumes a study that was stopped or killed.
    """
    from workhorse.config.base import read_yaml

    read_yaml(study, "study")  # first: an invalid file fails before torch is imported
    from workhorse import compare as library
    from workhorse.native.allocator import keep_freed_memory

    asked = library.read_study(study)
    if quick:
        asked = library.quick(asked)
        warn(library.QUICK)
    if settings := train_settings(device=device, dtype=dtype):
        asked = library.with_settings(asked, settings)
    folder = out or Path("runs") / (f"{asked.name}-quick" if quick else asked.name)
    if dry_run:
        with keep_freed_memory():
            found = library.dry_run(asked, folder, jobs=jobs, threads=threads)
        for line in found["notices"]:
            warn(line)
        print_result(found, as_json, text=_account(found, folder))
    else:
        _compare(asked, folder, jobs, threads, as_json)


def _compare(study: Any, out: Path, jobs: int, threads: int, as_json: bool) -> None:
    from workhorse.cli.compare_progress import show_study
    from workhorse.compare import compare
    from workhorse.native.allocator import keep_freed_memory
    from workhorse.train import StopSignals

    with show_study() as show, keep_freed_memory():
        found = compare(
            study, out, jobs=jobs, threads=threads, on_event=show, signals=StopSignals()
        )
    fields = {name: getattr(found, name) for name in ("folder", "done", "trials", "stopped_by")}
    result = {**(found.results or {}), **fields}
    print_result(result, as_json, text=_summary(found))
    if found.stopped_by is not None:
        click.get_current_context().exit(ExitCode.after(found.stopped_by))


def _summary(found: Any) -> str:
    if found.results is None:
        return (
            f"{found.folder}: {found.done} of {counted(found.trials, 'trial')} done, stopped by "
            f"{found.stopped_by} and saved\nrun the same command to resume"
        )
    from workhorse.compare.report import verdicts

    lines = verdicts(found.results)
    lines += [f"note: {note}" for note in found.results["notes"]]
    return "\n".join([*lines, f"report {shlex.quote(str(found.folder / 'report.html'))}"])


def _account(found: dict[str, Any], out: Path) -> str:
    """Format the result of a dry run: a line for each variant and trial, and the remaining time."""
    from workhorse.cli.train_progress import duration

    wide = max(len(name) for name in found["variants"])
    lines = [
        f"{name:{wide}}  {one['parameters']:,} parameters, {counted(one['steps'], 'step')}, "
        f"{one['tokens']:,} tokens, {one['flops']:.3g} FLOPs, {duration(one['seconds'])} a run"
        for name, one in found["variants"].items()
    ]
    left = sum(not trial["done"] for trial in found["trials"])
    done = len(found["trials"]) - left
    lines += [f"  {trial['trial']}{' (done)' * trial['done']}" for trial in found["trials"]]
    lines.append(
        f"{counted(left, 'trial')} in {out}{f' ({done} done)' if done else ''}, "
        f"{duration(found['seconds'])} of steps, plus validation and checkpoints"
    )
    return "\n".join(lines)
