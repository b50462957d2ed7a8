"""`report.md` and `report.html`: the results of a study as sentences, tables and curves."""

import json
from collections.abc import Callable
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.compare.folder import StudyFolder
from workhorse.compare.plan import Plan, Trial
from workhorse.compare.results import ONE_SEED
from workhorse.compare.statistics import FEWEST
from workhorse.devices.memory import size
from workhorse.files.writing import write_atomically
from workhorse.train import Event, read_metrics
from workhorse.train.report.chart import Series, line_chart, shown
from workhorse.train.report.page import duration, rendered

Rows = list[list[str]]
"""Rows of a table, as lists of cells; the first row is the header."""


def write_reports(plan: Plan, folder: StudyFolder, results: dict[str, Any]) -> None:
    """Write the results of a study as `results.json`, `report.md` and `report.html`.

    Existing files are replaced.

    Raises:
        WorkhorseError: a file cannot be written.
    """
    write_atomically(folder.results_file, json.dumps(results, indent=2) + "\n")
    write_atomically(folder.text_file, as_markdown(results))
    page = rendered(
        "workhorse.compare",
        "report.html",
        title=results["study"],
        results=results,
        verdicts=verdicts(results),
        tables=tables(results),
        method=method(results),
        charts=[chart for chart in charts(plan, folder, results) if chart],
        study=folder.study_file.read_text("utf-8"),
    )
    write_atomically(folder.report_file, page)


def as_markdown(results: dict[str, Any]) -> str:
    """The report of a study as Markdown, from the results of `collect`."""
    parts = [f"# {results['study']}"]
    if results["question"]:
        parts.append(results["question"].strip())
    parts.append("\n".join(f"- {line}" for line in verdicts(results)))
    parts += [f"## {title}\n\n{_table(rows)}" for title, rows in tables(results)]
    parts.append(method(results))
    if results["notes"]:
        parts.append("## Notes\n\n" + "\n".join(f"- {line}" for line in results["notes"]))
    parts.append("\n".join(f"- {line}" for line in results["environment"]))
    return "\n\n".join(parts) + "\n"


def verdicts(results: dict[str, Any]) -> list[str]:
    """A sentence about each variant: whether it is better or worse than the baseline.

    With one seed, the only sentence is that no comparison is possible.
    """
    found = [one["verdict"]["words"] for one in results["variants"].values() if one["verdict"]]
    return list(dict.fromkeys(found)) or [ONE_SEED]


def method(results: dict[str, Any]) -> str:
    """A paragraph that explains how the figures of a report were computed."""
    (kind, amount), *_ = results["budget"].items()
    text = (
        f"The budget of each run is {shown(amount)} {'FLOPs' if kind == 'flops' else kind}. Losses "
        f"are measured on the whole held-out text after the last step, in {results['unit']}"
        f"{' per token' if results['measure'] == 'loss' else ''}; lower is better."
    )
    if len(results["seeds"]) >= FEWEST:
        text += (
            " Intervals are 95 % confidence intervals (Student's t over the seeds). Differences "
            f"from {results['baseline']} are paired by seed. p is from a paired t-test, with "
            "Holm's correction for the number of comparisons. A difference is significant if "
            "p < 0.05."
        )
    if results["search_seed"] is not None:
        factors = ", ".join(f"{factor:g}" for factor in results["learning_rates"])
        text += (
            f" The learning rate of each variant is the best of the recipe's × {factors} on seed "
            f"{results['search_seed']}, which is not part of the comparison."
        )
    return text


def tables(results: dict[str, Any]) -> list[tuple[str, Rows]]:
    """The tables of a report, each with its title."""
    found = [("Losses", _losses(results)), ("Cost of each run", _spent(results))]
    if results["contexts"]:
        shortest, *longer = map(str, results["contexts"])
        found.append(
            ("Losses by context length", _by_context(results, "loss", [shortest, *longer], ""))
        )
        found.append(
            (f"Difference from context {shortest}", _by_context(results, "more", longer, "+"))
        )
    if results["search_seed"] is not None:
        found.append(("Learning rate search", _search(results)))
    return found


def _losses(results: dict[str, Any]) -> Rows:
    head = ["variant", f"loss, {results['unit']}", "95 %", f"minus {results['baseline']}"]
    head += ["95 %", "p", "p, corrected", *(f"seed {seed}" for seed in results["seeds"])]
    rows = [head]
    for name, one in results["variants"].items():
        off = one["difference"]
        row = [name, _figure(one["mean"]), _span(one, ".4f")]
        row += [f"{off['mean']:+.4f}", _span(off, "+.4f")] if off else ["", ""]
        row += [f"{off['p']:.2g}", f"{off['p_holm']:.2g}"] if off else ["", ""]
        rows.append([*row, *(_figure(loss) for loss in one["losses"].values())])
    return rows


def _by_context(results: dict[str, Any], key: str, contexts: list[str], sign: str) -> Rows:
    """A table with a row per variant and a column per context length.

    Each cell is a mean, with the half-width of its 95 % interval if there are several seeds. `key`
    is `loss`, or `more` for the difference from the shortest context. `sign` is `+` to print the
    sign of positive means, otherwise empty.
    """
    rows = [["variant", *contexts]]
    for name, one in results["variants"].items():
        cells = []
        for context in contexts:
            figures = one["by_context"].get(context, {key: {"mean": None}})[key]
            cell = "not finite" if figures["mean"] is None else f"{figures['mean']:{sign}.4f}"
            if "high" in figures:
                cell += f" ± {figures['high'] - figures['mean']:.4f}"
            cells.append(cell)
        rows.append([name, *cells])
    return rows


def _spent(results: dict[str, Any]) -> Rows:
    head = ["variant", "parameters", "steps", "tokens", "FLOPs", "learning rate"]
    rows = [[*head, "time", "tokens/s", "peak memory"]]
    for name, one in results["variants"].items():
        cost = one["cost"]
        rows.append(
            [
                name,
                f"{one['parameters']:,}",
                f"{one['steps']:,}",
                f"{one['tokens']:,}",
                f"{one['flops']:.3g}",
                f"{one['learning_rate']:.3g} (× {one['learning_rate_factor']:g})",
                _or_dash(cost["seconds"], duration),
                _or_dash(cost["tokens_per_second"], lambda speed: f"{speed:,.0f}"),
                _or_dash(cost["peak_memory"], size),
            ]
        )
    return rows


def _search(results: dict[str, Any]) -> Rows:
    head = ["variant", *(f"× {factor:g}" for factor in results["learning_rates"])]
    rows = results["variants"].items()
    return [head, *([name, *map(_figure, one["search"].values())] for name, one in rows)]


def _figure(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _span(figures: dict[str, Any], form: str) -> str:
    if figures["low"] is None:
        return ""
    return f"{figures['low']:{form}} to {figures['high']:{form}}"


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _table(rows: Rows) -> str:
    """Format a table as Markdown; all columns except the first are right-aligned."""
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))


def charts(plan: Plan, folder: StudyFolder, results: dict[str, Any]) -> list[str]:
    """Charts of the held-out and the training loss by step, as SVG, with a curve per variant.

    A curve is the mean over the seeds, with a band from the lowest to the highest loss.
    """
    events = {
        name: [
            read_metrics(RunDirectory(folder.trial(Trial(name, seed))).metrics_file)
            for seed in plan.study.seeds
        ]
        for name in plan.variants
    }
    unit = results["unit"]
    return [
        line_chart(
            f"Held-out loss during training, {unit}",
            [_curve(name, runs, plan.measure, "validation") for name, runs in events.items()],
        ),
        line_chart(
            "Training loss, nats",
            [_curve(name, runs, "loss", "step") for name, runs in events.items()],
        ),
    ]


def _curve(name: str, runs: list[list[Event]], key: str, kind: str) -> Series:
    """A variant's loss by step: the mean over its runs, with a band from lowest to highest.

    Steps for which a run has no value are omitted, and so is a validation on the whole split after
    others on a subset. `key` is the key of the loss in events of this kind.
    """
    values: dict[int, list[float]] = {}
    for run in runs:
        measured = [event for event in run if event["kind"] == kind]
        for event in [event for event in measured if not event.get("whole")] or measured:
            if event[key] is not None:
                values.setdefault(event["step"], []).append(event[key])
    whole = {step: found for step, found in sorted(values.items()) if len(found) == len(runs)}
    points = [(step, sum(found) / len(found)) for step, found in whole.items()]
    band = [(step, min(found), max(found)) for step, found in whole.items()]
    return Series(name, points, marked=kind == "validation", band=band if len(runs) > 1 else ())
