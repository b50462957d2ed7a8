"""`workhorse train`: a recipe in, a run directory out."""

import signal
from pathlib import Path
from typing import Any

import click

from workhorse.cli.options import json_option, runtime_options
from workhorse.cli.output import ExitCode, print_result


@click.command("train")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/NAME]")
@click.option("--resume", is_flag=True, help="Go on from the newest whole checkpoint.")
@click.option("--dry-run", is_flag=True, help="Show size, memory and time; write nothing.")
@runtime_options
@json_option
def command(
    *,
    recipe: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    resume: bool,
    dry_run: bool,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Train a model as RECIPE says, a YAML file; `workhorse recipe` tells what it may say.

    Settings after it replace the recipe's, as in `train.steps=500 model.d_model=256`; --device,
    --dtype and --threads, where given, replace those of its `train` section. An interrupt or
    SIGTERM ends the run after the step under way, with a checkpoint; --resume goes on.
    """
    from workhorse.config import apply_overrides, read_yaml
    from workhorse.train import Recipe

    flags = [f"train.device={device}"] if device != "auto" else []
    flags += [f"train.dtype={dtype}"] if dtype != "auto" else []
    flags += [f"train.threads={threads}"] if threads else []
    settings = Recipe.from_dict(apply_overrides(read_yaml(recipe), [*overrides, *flags]))
    if dry_run:
        _dry_run(settings, as_json)
    else:
        _train(settings, out or Path("runs") / settings.name, resume, as_json)


def _train(settings: Any, out: Path, resume: bool, as_json: bool) -> None:
    from workhorse.cli.train_progress import show_training
    from workhorse.train import train

    with show_training(settings.train.steps) as show:
        result = train(settings, out, resume=resume, on_event=show)
    print_result(result.to_dict(), as_json, text=_summary(result))
    if result.stopped_by is not None:
        stopped = result.stopped_by == signal.SIGTERM.name
        code = ExitCode.STOPPED if stopped else ExitCode.INTERRUPTED
        click.get_current_context().exit(code)


def _summary(result: Any) -> str:
    lines = [f"{result.run_directory}: step {result.step:,} of {result.steps:,}"]
    if result.stopped_by is not None:
        lines[0] += f", stopped by {result.stopped_by} and saved; go on with --resume"
    if result.validation_loss is not None:
        held_out = f"validation loss {result.validation_loss:.4f}"
        if result.bits_per_byte is not None:
            held_out += f", {result.bits_per_byte:.4f} bits per byte"
        lines.append(held_out)
    lines.append(f"{result.tokens:,} tokens in {result.seconds:.1f} s")
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} steps skipped: loss or gradient was not finite")
    return "\n".join(lines)


def _dry_run(settings: Any, as_json: bool) -> None:
    from workhorse.cli.train_progress import clock
    from workhorse.train import estimate

    found = estimate(settings)
    parameters, memory = found["parameters"], found["memory"]
    roles = ", ".join(
        f"{name} {count:,}"
        for name, count in parameters.items()
        if name not in ("total", "active") or (name == "active" and count != parameters["total"])
    )
    parts = ", ".join(f"{name} {_mib(size)}" for name, size in memory.items() if name != "total")
    basis = {
        "steps": "from a few steps on random tokens; validation and samples come on top",
        "matrix product": "at the rate of the quickest matrix product, so at least that",
    }[found["seconds_from"]]
    text = "\n".join(
        [
            settings.to_yaml().rstrip(),
            "",
            f"parameters  {parameters['total']:,} ({roles})",
            f"memory      {_mib(memory['total'])} ({parts}); "
            "activations, logits and what an update needs for a moment come on top",
            f"tokens      {found['tokens']:,}",
            f"export      {found['exports_as']}",
            f"time        {clock(found['seconds'])} on {found['device']}, {basis}",
        ]
    )
    print_result(found, as_json, text=text)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
