"""What a study would train and how long it would take, without training it."""

from pathlib import Path
from typing import Any

import torch

from workhorse.compare.folder import StudyFolder
from workhorse.compare.plan import Plan, check_variants, make_plan
from workhorse.compare.run import seconds_of_step
from workhorse.compare.study import Study, no_study
from workhorse.devices.names import use_threads
from workhorse.train import Recipe, estimate
from workhorse.train.estimate import vocab_size_of


def dry_run(study: Study, out: str | Path, *, jobs: int = 1, threads: int = 0) -> dict[str, Any]:
    """The trials of a study and what they would need. Writes nothing.

    A tokenizer that is still to be trained is taken to fill its vocabulary, and a variant whose
    time was not measured yet is timed for a few steps on random tokens.

    Args:
        study: with the fields of its base.
        out: its folder, which need not exist.
        jobs: trials at once.
        threads: CPU threads of all of them together; 0: as many as PyTorch takes.

    Returns:
        `study`, `measure`, `variants` (by name: `parameters`, `steps`, `tokens`, `flops` and
        `seconds` of one run), `trials` (`trial`, `folder`, `steps`, `done`), `seconds` of those
        that are left, without validation, and `notices`.

    Raises:
        WorkhorseError: `compare` would refuse before its first trial.
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
    """Of one run of a variant."""
    recipe = plan.variants[name].recipe
    if name in timings:
        return timings[name] * recipe.train.length
    return estimate(recipe)["seconds"]
