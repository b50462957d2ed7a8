"""Run all trials of a study and compare their losses (`compare`), or only list them (`dry_run`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workhorse.compare.folder import StudyFolder
from workhorse.compare.plan import Plan, Trial, check_variants, make_plan
from workhorse.compare.processes import run_in_processes
from workhorse.compare.report import write_reports
from workhorse.compare.results import chosen_factors, collect
from workhorse.compare.statistics import FEWEST, scipy_stats
from workhorse.compare.study import Study, no_study
from workhorse.compare.trials import run_trial
from workhorse.data import prepare_tokenizer
from workhorse.devices.names import resolve_device, use_threads
from workhorse.memory.step_memory import PlannedStep
from workhorse.run import estimate
from workhorse.run.dry_run import time_steps, vocab_size_of
from workhorse.train import Event, Recipe
from workhorse.train.loop import StopSignals


def dry_run(study: Study, out: str | Path, *, jobs: int = 1, threads: int = 0) -> dict[str, Any]:
    """List the trials (runs) of a study and their cost. Writes nothing.

    A tokenizer that is not trained yet is assumed to reach its configured vocabulary size. A
    variant without a measured time per step is timed for a few steps on random tokens.

    Args:
        study: the study; `base` must contain the fields of the recipe, as after `read_study`.
        out: the study's folder; it may be missing.
        jobs: the number of parallel trials.
        threads: the number of CPU threads of all trials together; 0: PyTorch's default.

    Returns:
        `study` (its name), `measure` (the compared loss), `variants` (by name: `parameters`, and
        `steps`, `tokens`, `flops` and `seconds` of one run), `trials` (for each: `trial`, `folder`,
        `steps`, `done`), `seconds` (of the steps of all remaining trials) and `notices`.

    Raises:
        WorkhorseError: `compare` would fail before its first trial.
    """
    if not isinstance(study, Study):
        raise no_study(study)
    folder = StudyFolder(out)
    check_variants(study, folder.path)
    folder.check(study)
    before = torch.get_num_threads()
    try:
        use_threads(max(1, (threads or before) // jobs))
        return _account(study, folder, jobs)
    finally:
        torch.set_num_threads(before)


def _account(study: Study, folder: StudyFolder, jobs: int) -> dict[str, Any]:
    timings = folder.timings()

    def step_seconds(name: str, recipe: Recipe) -> float:
        if name not in timings:
            timings[name] = seconds_of_step(recipe, vocab_size_of(recipe))
        return timings[name]

    plan = make_plan(study, vocab_size_of, step_seconds)
    seconds = {name: _seconds(plan, name, timings) for name in plan.variants}
    trials = plan.all_trials
    rows = [
        {
            "trial": str(trial),
            "folder": trial.folder,
            "steps": plan.variants[trial.variant].recipe.train.steps,
            "done": folder.outcome(trial, study.contexts) is not None,
        }
        for trial in trials
    ]
    left = [seconds[t.variant] for t, row in zip(trials, rows, strict=True) if not row["done"]]
    return {
        "study": study.name,
        "measure": plan.measure,
        "variants": {
            name: {
                "parameters": variant.parameters,
                "steps": variant.recipe.train.steps,
                "tokens": variant.tokens,
                "flops": variant.flops,
                "seconds": seconds[name],
            }
            for name, variant in plan.variants.items()
        },
        "trials": rows,
        "seconds": sum(left) / jobs,
        "notices": plan.notices,
    }


def _seconds(plan: Plan, name: str, timings: dict[str, float]) -> float:
    """Seconds of the training steps of one run of a variant, measured or estimated."""
    recipe = plan.variants[name].recipe
    if name in timings:
        return timings[name] * recipe.train.length
    return estimate(recipe)["seconds"]


Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`: the progress of a study and, if it is finished, its results."""

    folder: Path
    done: int
    """Number of finished trials."""
    trials: int
    """Total number of trials."""
    results: dict[str, Any] | None
    """The results as returned by `workhorse.compare.results.collect`; None until all trials are
    finished."""
    stopped_by: str | None = None
    """The name of the signal that stopped the study after saving; None if the study is finished."""


def compare(
    study: Study,
    out: str | Path,
    *,
    jobs: int = 1,
    threads: int = 0,
    on_event: Listener = lambda event: None,
    signals: StopSignals | None = None,
) -> Comparison:
    """Train every variant of a study with every seed, and compare the variants.

    The same call resumes a study that was stopped or killed; finished trials are not repeated.

    Args:
        study: the study; `base` must contain the fields of the recipe, as after `read_study`.
        out: the study's folder: new, empty, or used by this study before.
        jobs: the number of parallel trials, each in its own process if more than 1.
        threads: the number of CPU threads of all trials together; 0: PyTorch's default. Each trial
            gets an equal share, unless the recipe sets `train.threads`.
        on_event: called with each event, a mapping. Its `kind` is `plan` (with `trials`, `done`,
            total `steps` and `steps_done`), `begin` or `end_of_trial`, `notice` (with `message`),
            or a kind of event of `train`. Events of a trial have its name as `trial`.
        signals: signals that stop the study after saving; see `workhorse.train.train`.

    Raises:
        WorkhorseError: the study cannot be run, `out` has other files, or SciPy is not installed.
    """
    if not isinstance(study, Study):
        raise no_study(study)
    if len(study.seeds) >= FEWEST:
        scipy_stats()
    folder = StudyFolder(out)
    # Before `folder.check`, which would report a misspelt key as a change of the study.
    check_variants(study, folder.path)
    folder.check(study)
    make_plan(study, vocab_size_of)  # raises all other errors before a file is written
    before = torch.get_num_threads()
    share = max(1, (threads or before) // jobs)
    try:
        use_threads(share)
        with folder.lock():
            folder.begin(study)
            plan = _real_plan(study, folder, on_event)
            for line in plan.notices:
                on_event({"kind": "notice", "message": line})
            signals = signals or StopSignals(())
            return _Run(plan, folder, jobs, share, on_event, signals=signals).run()
    finally:
        torch.set_num_threads(before)


def _real_plan(study: Study, folder: StudyFolder, on_event: Listener) -> Plan:
    """The plan of a study, from the sizes of trained tokenizers and from measured step times.

    Trains tokenizers and measures step times if they are missing, and stores them in the folder.
    """

    def vocabulary(recipe: Recipe) -> int:
        made = prepare_tokenizer(
            recipe.tokenizer,
            recipe.data,
            folder.data,
            progress=lambda done, total: on_event({"kind": "data", "done": done, "total": total}),
            notify=lambda line: on_event({"kind": "notice", "message": line}),
        )
        return made.vocab_size

    timings = folder.timings()

    def step_seconds(name: str, recipe: Recipe) -> float:
        if name not in timings:
            timings[name] = seconds_of_step(recipe, vocabulary(recipe))
            folder.save_timings(timings)
        return timings[name]

    return make_plan(study, vocabulary, step_seconds)


def seconds_of_step(recipe: Recipe, vocabulary: int) -> float:
    """Seconds per training step of a recipe on this machine.

    A few steps are timed on random tokens; the time of the fastest is returned.
    """
    device = resolve_device(recipe.train.device)
    config = recipe.decoder_config(vocabulary)
    return time_steps(PlannedStep.of_recipe(recipe, config, device))


class _Run:
    """Runs the trials of a plan and writes the results into the study's folder."""

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        jobs: int,
        threads: int,
        on_event: Listener,
        *,
        signals: StopSignals,
    ) -> None:
        self.plan, self.folder, self.jobs, self.on_event = plan, folder, jobs, on_event
        self.threads, self.signals = threads, signals

    def run(self) -> Comparison:
        """Run all unfinished trials, the learning rate search first, and then write the reports."""
        everything = self.plan.all_trials
        done = [trial for trial in everything if self._is_done(trial)]
        self.on_event(
            {
                "kind": "plan",
                "trials": len(everything),
                "done": len(done),
                "steps": sum(map(self._steps, everything)),
                "steps_done": sum(map(self._steps, done)),
            }
        )
        with self.signals:
            stopped = self._train(self.plan.searching)
            if stopped is None:
                chosen = self.plan.trials(chosen_factors(self.plan, self.folder))
                stopped = self._train(chosen)
        results = None
        if stopped is None:
            results = collect(self.plan, self.folder)
            write_reports(self.plan, self.folder, results)
        finished = sum(map(self._is_done, everything))
        return Comparison(self.folder.path, finished, len(everything), results, stopped)

    def _train(self, trials: list[Trial]) -> str | None:
        """Run the trials that are not finished yet.

        Returns the name of the signal that stopped them, or None if all are finished.
        """
        left = [trial for trial in trials if not self._is_done(trial)]
        work = [(trial, self._recipe(trial), self.folder.trial(trial)) for trial in left]
        if self.jobs > 1:
            return run_in_processes(
                work,
                self.jobs,
                self.plan.study.contexts,
                on_event=self._notify,
                on_end=self._end,
                signals=self.signals,
            )
        for trial, recipe, out in work:
            if self.signals.received:  # the signal arrived between two trials
                return self.signals.received.name
            self._notify(trial, {"kind": "begin"})
            notify = partial(self._notify, trial)
            contexts = self.plan.study.contexts
            stopped = run_trial(recipe, out, notify, contexts=contexts, signals=self.signals)
            if stopped:
                return stopped
            self._end(trial)
        return None

    def _recipe(self, trial: Trial) -> Recipe:
        return self.plan.recipe(trial, str(self.folder.data), self.threads)

    def _notify(self, trial: Trial, event: Event) -> None:
        self.on_event({**event, "trial": str(trial)})

    def _end(self, trial: Trial) -> None:
        outcome = self.folder.outcome(trial, self.plan.study.contexts)
        assert outcome is not None, f"{trial} is finished"
        self._notify(
            trial, {"kind": "end_of_trial", "steps": self._steps(trial), **outcome.to_dict()}
        )

    def _steps(self, trial: Trial) -> int:
        return self.plan.variants[trial.variant].recipe.train.length

    def _is_done(self, trial: Trial) -> bool:
        return self.folder.outcome(trial, self.plan.study.contexts) is not None
