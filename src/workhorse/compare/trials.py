"""Run one trial of a study: start or resume its training run, and write its outcome."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.runs.run_directory import FolderLock
from workhorse.compare.folder import Losses, Outcome, outcome_file
from workhorse.data import read_documents
from workhorse.devices.memory import most_resident, resident
from workhorse.devices.names import resolve_device
from workhorse.errors import WorkhorseError
from workhorse.evaluate import evaluate
from workhorse.files.writing import write_atomically
from workhorse.model.load import load
from workhorse.native.allocator import give_back_freed_memory
from workhorse.run import train
from workhorse.train import DivergedError, Event, Recipe, StopSignals, read_metrics

PATIENCE = 60.0
"""Maximum seconds to wait for a process of a killed study that is still saving the trial."""


def run_trial(
    recipe: Recipe,
    out: Path,
    on_event: Callable[[Event], None],
    *,
    contexts: Sequence[int] = (),
    signals: StopSignals | None = None,
) -> str | None:
    """Train a trial of a study to its end and write its outcome (`trial.json`) into `out`.

    A trial that was started before is resumed.

    Args:
        recipe: the trial's recipe.
        out: the trial's run directory, new or existing.
        on_event: called with the events of training.
        contexts: context lengths in tokens at which the final model is also evaluated.
        signals: signals that stop the trial after saving; see `workhorse.train.train`.

    Returns:
        The name of the signal that stopped the trial after saving; None if the trial is finished.

    Raises:
        WorkhorseError: the trial cannot be trained. Divergence is not an error but an outcome.
    """
    _wait_until_free(out)
    device = resolve_device(recipe.train.device)
    before = _watch_memory(device)
    run, diverged = RunDirectory(out), None
    try:
        result = train(recipe, out, resume=run.exists, on_event=on_event, signals=signals)
        if result.stopped_by is not None:
            return result.stopped_by
        _check_validated(run, result.step)
        if result.validation_loss is None:
            diverged = "the held-out loss was not finite after the last step"
    except DivergedError as error:
        diverged = str(error).partition(";")[0]
    outcome = Outcome(
        **_from_metrics(run, diverged),
        peak_memory=_peak_memory(device, before),
        by_context={} if diverged else _by_context(out, device, contexts),
    )
    write_atomically(outcome_file(out), outcome.to_json() + "\n")
    return None


def _check_validated(run: RunDirectory, step: int) -> None:
    """Check that a finished run's metrics have a start and a validation after the last step."""
    events = read_metrics(run.metrics_file)
    ended = any(event["kind"] == "validation" and event["step"] == step for event in events)
    if not ended or not any(event["kind"] == "start" for event in events):
        raise WorkhorseError(
            f"{run.metrics_file} is damaged: it has no start, or no validation after step {step}; "
            f"restore it, or delete {run.path} to train the trial again"
        )


def _from_metrics(run: RunDirectory, diverged: str | None) -> dict[str, Any]:
    """The fields of a trial's outcome that are read from the metrics of its run.

    `diverged` is the error message if the run diverged, otherwise None. The losses of a diverged
    run are None.
    """
    events = read_metrics(run.metrics_file)
    last = {event["kind"]: event for event in events}
    steps = [event for event in events if event["kind"] == "step"]
    warm = [event for event in steps if not event["warming_up"]] or steps
    validation, step = {} if diverged else last["validation"], last.get("step", {})
    of_start = ("parameters", "flops_per_token", "device", "threads", "versions")
    return {
        **{name: validation.get(name) for name in ("loss", "bits_per_byte", "unknown_rate")},
        "diverged": diverged,
        "steps": step.get("step", 0),
        **{name: step.get(name, 0) for name in ("tokens", "skipped_steps", "seconds")},
        **{name: last["start"][name] for name in of_start},
        "tokens_per_second": median(event["tokens_per_second"] for event in warm) if warm else None,
    }


def _by_context(run: Path, device: torch.device, contexts: Sequence[int]) -> dict[str, Losses]:
    """The losses of a run's final model on its held-out documents, by context length in tokens."""
    if not contexts:
        return {}
    model = load(run, device=device, dtype="float32")
    assert model.data is not None, "a run has its data"
    found: dict[str, Losses] = {}
    for context in contexts:
        documents = (
            document
            for source in model.data.sources.values()
            if source.has_validation
            for document in read_documents(source, "validation")
        )
        result = evaluate(model.decoder, model.text, documents, start=model.start, context=context)
        found[str(context)] = Losses(loss=result.loss, bits_per_byte=result.bits_per_byte)
    return found


def _wait_until_free(out: Path) -> None:
    """Wait until no other process uses a run directory.

    A process of a killed study may still be saving a checkpoint there.
    """
    until = time.monotonic() + PATIENCE
    while out.is_dir():
        try:
            FolderLock(out).release()
            return
        except WorkhorseError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _watch_memory(device: torch.device) -> int:
    """Start measuring the peak memory, and return the number of bytes already in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    give_back_freed_memory()
    return resident()


def _peak_memory(device: torch.device, before: int) -> int | None:
    """Peak bytes used by a trial since `_watch_memory`; None if the system does not report them.

    `before` is the return value of `_watch_memory`, the bytes that were already in use.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return max(0, most_resident() - before) if sys.platform == "linux" else None
