"""The results of a finished study as plain data, for `results.json` and the reports."""

import math
from statistics import fmean, median
from typing import Any

from workhorse.compare.folder import COSTS, Outcome, StudyFolder
from workhorse.compare.plan import Plan, Trial, Variant
from workhorse.compare.statistics import FEWEST, UNITS, holm, interval, paired, verdict
from workhorse.errors import counted

UNLEARNED = 0.99
"""A model whose loss is at least this fraction of ln(vocabulary size) has learned nothing."""
ONE_SEED = "one seed: no interval and no verdict; add a second seed to the study"


def chosen_factors(plan: Plan, folder: StudyFolder) -> dict[str, float]:
    """The learning rate factor of every variant, by name: the best in the learning rate search.

    Without a search, it is the study's only factor.
    """
    if not plan.searching:
        return dict.fromkeys(plan.variants, plan.study.learning_rates[0])
    found: dict[str, float] = {}
    for name, losses in _searched(plan, folder).items():
        finite = {factor: loss for factor, loss in losses.items() if loss is not None}
        # If every run diverged, take the lowest factor; the trials will then report divergence.
        found[name] = min(finite, key=lambda factor: finite[factor]) if finite else min(losses)
    return found


def collect(plan: Plan, folder: StudyFolder) -> dict[str, Any]:
    """Collect the results of a study. All of its trials must be finished.

    Returns:
        `study`, `question`, `measure` (`loss` in nats per token, or `bits_per_byte`), `unit`,
        `budget`, `baseline`, `seeds`, `learning_rates`, `search_seed`, `contexts`,
        `smallest_effect`, `variants` (by name, see `_variant`), `notes` and `environment`. Times
        and memory are only under `cost` of a variant. All other values are the same if the study
        was stopped and resumed.
    """
    study = plan.study
    factors = chosen_factors(plan, folder)
    outcomes = {
        name: [_outcome(plan, folder, Trial(name, seed, factors[name])) for seed in study.seeds]
        for name in plan.variants
    }
    searched = _searched(plan, folder)
    variants = {
        name: _variant(plan, variant, factors[name], outcomes[name], searched.get(name, {}))
        for name, variant in plan.variants.items()
    }
    _compare(plan, variants)
    return {
        "study": study.name,
        "question": study.question,
        "measure": plan.measure,
        "unit": UNITS[plan.measure],
        "budget": {study.budget.kind: study.budget.amount, "parameters": study.budget.parameters},
        "baseline": study.compared_with,
        "seeds": list(study.seeds),
        "learning_rates": list(study.learning_rates),
        "search_seed": study.search_seed if study.searches else None,
        "contexts": list(study.contexts),
        "smallest_effect": study.smallest_effect,
        "variants": variants,
        "notes": _notes(plan, variants, outcomes),
        "environment": _environment([one for of in outcomes.values() for one in of]),
    }


def _variant(
    plan: Plan,
    variant: Variant,
    factor: float,
    outcomes: list[Outcome],
    searched: dict[float, float | None],
) -> dict[str, Any]:
    """The results of one variant: its size, the cost of a run, its losses by seed, and their mean.

    `low` and `high` are the 95 % interval of `mean`. All three are None if a run diverged; the
    interval is also None if there is only one seed.

    `factor` is the variant's learning rate factor, and `outcomes` are in the order of the seeds.
    `searched` has the losses of its learning rate search by factor; it is empty without a search.
    """
    losses = [outcome.measured(plan.measure) for outcome in outcomes]
    known = [loss for loss in losses if loss is not None]
    whole = len(known) == len(losses)
    found = interval(known) if whole and len(known) >= FEWEST else None
    rates = plan.study.learning_rates
    at_end = bool(searched) and factor in (min(rates), max(rates))
    return {
        "settings": variant.settings,
        "parameters": outcomes[0].parameters,
        "steps": variant.recipe.train.steps,
        "tokens": variant.tokens,
        "vocab_size": variant.vocab_size,
        "flops": outcomes[0].flops_per_token * variant.tokens,
        "learning_rate_factor": factor,
        "learning_rate": variant.recipe.train.optimizer.learning_rate * factor,
        "learning_rate_at_end": at_end,
        "search": {f"{rate:g}": loss for rate, loss in searched.items()},
        "by_context": _by_context(plan, outcomes) if whole else {},
        "losses": dict(zip(map(str, plan.study.seeds), losses, strict=True)),
        "diverged": [
            seed for seed, one in zip(plan.study.seeds, outcomes, strict=True) if one.diverged
        ],
        "unknown_rate": max(outcome.unknown_rate or 0.0 for outcome in outcomes),
        "learned_nothing": _learned_nothing(variant, outcomes),
        "mean": fmean(known) if whole else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
        "difference": None,
        "verdict": None,
        "cost": _cost(outcomes),
    }


def _learned_nothing(variant: Variant, outcomes: list[Outcome]) -> str:
    """A sentence if all runs of a variant have at least the loss of a uniform guess, else empty."""
    losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
    guess = math.log(variant.vocab_size)
    if not losses or min(losses) < UNLEARNED * guess:
        return ""
    return (
        f"{variant.name} learned nothing: its loss is {fmean(losses):.4f} nats per token, and a "
        f"uniform guess has ln({variant.vocab_size:,}) = {guess:.4f}; train for more steps, or "
        "with another learning rate"
    )


def _by_context(plan: Plan, outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """A variant's loss at each context length, and its difference from the shortest length's loss.

    The result has, by context length, `losses` (by seed), and the means `loss` and `more` (the
    difference), with 95 % intervals if there are several seeds.
    """
    found: dict[str, dict[str, Any]] = {}
    shortest: list[float] = []
    for context in map(str, plan.study.contexts):
        losses = [getattr(outcome.by_context[context], plan.measure) for outcome in outcomes]
        shortest = shortest or losses
        more = [loss - first for loss, first in zip(losses, shortest, strict=True)]
        several = len(losses) >= FEWEST
        found[context] = {
            "losses": dict(zip(map(str, plan.study.seeds), losses, strict=True)),
            "loss": vars(interval(losses)) if several else {"mean": losses[0]},
            "more": vars(interval(more)) if several else {"mean": more[0]},
        }
    return found


def _compare(plan: Plan, variants: dict[str, dict[str, Any]]) -> None:
    """Add `difference` and `verdict` to the results of every variant except the baseline."""
    study = plan.study
    baseline = study.compared_with
    others = [name for name in variants if name != baseline]
    if len(study.seeds) < FEWEST:
        for name in others:
            variants[name]["verdict"] = {"outcome": None, "words": ONE_SEED}
        return
    base = variants[baseline]
    whole = [name for name in others if not _why_none(plan, name, variants)]
    found = {name: paired(_losses(variants[name]), _losses(base)) for name in whole}
    corrected = dict(zip(whole, holm([found[name].p for name in whole]), strict=True))
    for name in others:
        if name not in found:
            reason = _why_none(plan, name, variants)
            variants[name]["verdict"] = {"outcome": None, "words": f"no verdict: {reason}"}
            continue
        one = found[name]
        said = verdict(
            name,
            baseline,
            one,
            corrected[name],
            n=len(study.seeds),
            tests=len(found),
            unit=UNITS[plan.measure],
            smallest_effect=study.smallest_effect,
        )
        figures = {key: getattr(one, key) for key in ("mean", "low", "high", "p")}
        more = {"p_holm": corrected[name], "detectable": said.detectable}
        variants[name]["difference"] = figures | more
        variants[name]["verdict"] = {"outcome": said.outcome, "words": said.words}


def _why_none(plan: Plan, name: str, variants: dict[str, dict[str, Any]]) -> str:
    """The reason why a variant cannot be compared with the baseline; empty if there is none."""
    pair = (plan.study.compared_with, name)
    if all(variants[one]["learned_nothing"] for one in pair):
        return f"neither {' nor '.join(pair)} learned anything, see the notes"
    for one in pair:
        if variants[one]["diverged"]:
            return f"{one} diverged on at least one seed"
        if plan.measure == "bits_per_byte" and variants[one]["unknown_rate"]:
            return f"the tokenizer of {one} has unknown tokens, so its loss is too low"
    return ""


def _losses(variant: dict[str, Any]) -> list[float]:
    return list(variant["losses"].values())


def _searched(plan: Plan, folder: StudyFolder) -> dict[str, dict[float, float | None]]:
    """The losses of the learning rate search, by variant and factor; None for a diverged run."""
    found: dict[str, dict[float, float | None]] = {}
    for trial in plan.searching:
        outcome = _outcome(plan, folder, trial)
        found.setdefault(trial.variant, {})[trial.factor] = outcome.measured(plan.measure)
    return found


def _outcome(plan: Plan, folder: StudyFolder, trial: Trial) -> Outcome:
    outcome = folder.outcome(trial, plan.study.contexts)
    assert outcome is not None, f"{trial} is finished"
    return outcome


def _cost(outcomes: list[Outcome]) -> dict[str, float | None]:
    """The cost of a variant's run: medians over the seeds of time and tokens per second.

    Memory is the minimum over the seeds, because the first run in a process also loads libraries.
    """
    cost: dict[str, float | None] = {}
    for name in COSTS:
        known = [value for one in outcomes if (value := getattr(one, name)) is not None]
        typical = min if name == "peak_memory" else median
        cost[name] = typical(known) if known else None
    return cost


def _notes(
    plan: Plan, variants: dict[str, dict[str, Any]], outcomes: dict[str, list[Outcome]]
) -> list[str]:
    """Sentences about problems that affect the results of a study."""
    notes = list(plan.notices)
    for name, variant in variants.items():
        if variant["learning_rate_at_end"]:
            notes.append(
                f"{name}: the best learning rate factor, {variant['learning_rate_factor']:g}, is "
                "at an end of the list; a better one may be outside the list"
            )
        for seed, outcome in zip(plan.study.seeds, outcomes[name], strict=True):
            if outcome.diverged:
                notes.append(f"{name}, seed {seed}: {outcome.diverged}")
            elif outcome.skipped_steps:
                notes.append(
                    f"{name}, seed {seed}: {counted(outcome.skipped_steps, 'step')} skipped"
                )
        if variant["learned_nothing"]:
            notes.append(variant["learned_nothing"])
        if unknown := variant["unknown_rate"]:
            notes.append(
                f"{name}: {unknown:.2%} of the held-out tokens are unknown, so its loss is too low"
            )
    return notes


def _environment(outcomes: list[Outcome]) -> list[str]:
    """A line for each combination of device, threads and library versions that trials ran with.

    If there are several lines, the trials may have rounded differently.
    """
    lines = {
        f"{outcome.device}, {outcome.threads} CPU thread{'s' if outcome.threads != 1 else ''}, "
        + ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        for outcome in outcomes
    }
    return sorted(lines)
