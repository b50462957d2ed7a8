"""`report.html`: the report of a run, in one file that needs no network."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from workhorse.checkpoints import RunDirectory
from workhorse.devices.memory import size
from workhorse.errors import WorkhorseError, counted
from workhorse.files.writing import write_atomically
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.objective import ObjectiveConfig
from workhorse.train.recipe.training import OBJECTIVES
from workhorse.train.report.chart import shown
from workhorse.train.report.metrics import Event, read_metrics
from workhorse.train.report.panels import charts

SAMPLES = {"Samples of the recipe's prompts": "samples", "Completions in training": "rollouts"}
"""The kinds of events with completions, by title."""
SAMPLED_TIMES = 24
"""Maximum number of times that completions are shown for: the first, the last, others between."""
MOST_LETTERS = 2000
"""Number of characters of a prompt or a completion that are shown."""
NOT_SHOWN = ("kind", "step", "name", "time", "peak_flops")
"""Keys of a `start` event that the page shows elsewhere or under another name."""
MINUTE = 60


def write_report(runs: Sequence[RunDirectory], out: Path | None = None) -> Path:
    """Write the report of one or several runs from their metrics, replacing an existing file.

    Args:
        runs: the runs, finished or in training.
        out: the file; None: `report.html` in the folder of the run, or in the innermost folder
            that contains all runs.

    Returns:
        The path of the file.

    Raises:
        WorkhorseError: a folder contains no run, a run is given twice, or the disk cannot be
            written.
    """
    paths = {run.path.absolute(): run for run in runs}
    common = Path(os.path.commonpath(paths))
    if len(paths) < len(runs):
        raise WorkhorseError(f"runs={len(runs)} has only {len(paths)} folders; name each run once")
    names = [str(path.relative_to(common)) if len(runs) > 1 else "" for path in paths]
    found = dict(zip(names, map(contents, runs), strict=True))
    events = {name: one["events"] for name, one in found.items()}
    units = {one["objective"].loss_unit for one in found.values()}
    first = [name for one in found.values() for name in one["objective"].headline]
    page = rendered(
        "workhorse.train.report",
        "page.html",
        title=" · ".join(one["title"] for one in found.values()),
        runs=found,
        groups=charts(events, units.pop() if len(units) == 1 else "", first[0]),
        samples={title: moments(events, kind) for title, kind in SAMPLES.items()},
    )
    path = out or common / runs[0].report_file.name
    write_atomically(path, page)
    return path


def rendered(package: str, template: str, *, title: str, **contents: Any) -> str:
    """Render a template of a package, with the head that all pages share."""
    style, script = map(_text, ("style.css", "script.js"))
    text = _compiled(package, template).render(style=style, script=script, title=title, **contents)
    # UTF-8 cannot represent half of a surrogate pair; JSON and YAML can.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def _compiled(package: str, template: str) -> Template:
    """The compiled template with its head. Compilation takes a tenth of the time of a small run."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(
        _text("head.html") + files(package).joinpath(template).read_text("utf-8")
    )


def _text(name: str) -> str:
    return files("workhorse.train.report").joinpath(name).read_text("utf-8")


def contents(run: RunDirectory) -> dict[str, Any]:
    """Return the data about a run in the page's template, from the files in its directory."""
    recipe, events = run.recipe(), read_metrics(run.metrics_file)
    kind = recipe.get("train", {}).get("objective", {}).get("kind", "next_token")
    objective = OBJECTIVES.get(kind, ObjectiveConfig)
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event["kind"], []).append(event)
        if event["kind"] == "validation" and "loss" not in objective.headline:
            event.pop("loss", None)  # it is minus the reward
    starts = of_kind.get("start", [{}])
    return {
        "title": recipe["name"],
        "description": reflowed(recipe.get("description", "")),
        "events": events,
        "objective": objective,
        "figures": figures(of_kind, objective),
        "notes": notes(of_kind),
        "recipe": run.recipe_file.read_text("utf-8"),
        "config": run.config_file.read_text("utf-8") if run.config_file.exists() else "",
        "environment": environment(starts[-1]),
    }


def moments(runs: Mapping[str, list[Event]], kind: str) -> list[tuple[list[str], Any]]:
    """Return completions at a few times of the runs, from the first to the last.

    Args:
        runs: the events of each run, by its name.
        kind: the kind of the events, a value of `SAMPLES`.

    Returns:
        For each time the runs with their steps, and for each prompt the samples of each run.
    """
    of_kind = {run: [one for one in events if one["kind"] == kind] for run, events in runs.items()}
    logged = {run: events for run, events in of_kind.items() if events}
    count = min(SAMPLED_TIMES, max(map(len, logged.values()), default=0))
    found = []
    for place in range(count):
        part = place / max(count - 1, 1)
        at = {run: events[round(part * (len(events) - 1))] for run, events in logged.items()}
        heads = [f"{run} step {event['step']:,}".strip() for run, event in at.items()]
        rows: dict[str, dict[str, list[Event]]] = {}
        for run, event in at.items():
            for sample in event[kind]:
                row = rows.setdefault(sample["prompt"][:MOST_LETTERS], {run: [] for run in at})
                row[run].append({**sample, "text": sample["text"][:MOST_LETTERS]})
        found.append((heads, rows))
    return found


def reflowed(text: str) -> str:
    """Remove line breaks inside paragraphs; line breaks before list items stay."""
    return re.sub(r"(?<=\S)[ \t]*\n(?=[^\s*-])", " ", text.strip())


def environment(start: Event) -> list[tuple[str, str]]:
    """Return labels and values that describe the run's last session; empty values are omitted."""
    facts = {**start, "began": start.get("time"), "peak_flops_per_second": start.get("peak_flops")}
    return [
        (key.replace("_", " "), readable(key, value))
        for key, value in facts.items()
        if key not in NOT_SHOWN and value not in (None, "", [], {})
    ]


def readable(key: str, value: Any) -> str:
    """Format a value of the environment for people."""
    if key == "began":
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return shown(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def figures(
    of_kind: dict[str, list[Event]], objective: type[ObjectiveConfig] = NextTokenConfig
) -> list[tuple[str, str]]:
    """Return the key figures of a run, each with its label: its results first, then its costs.

    Figures in the objective's `headline` are of the last validation, or else of the last step
    logged.
    """
    steps, validations = of_kind.get("step", []), of_kind.get("validation", [])
    rows = validated(validations[-1], objective) if validations else []
    found = {*chain(*validations), "loss"}
    for name in objective.headline if steps else ():
        if name not in found and (value := steps[-1].get(name)) is not None:
            label = name.replace("_", " ")
            rows.append((f"{label} at step {steps[-1]['step']:,}", f"{value:.4f}"))
    of_steps = ""
    if starts := of_kind.get("start"):
        start = starts[-1]
        rows.append(("parameters", shown(start["parameters"])))
        active = start.get("active_parameters", start["parameters"])  # absent from older runs
        if active != start["parameters"]:
            rows.append(("active parameters per token", shown(active)))
        if "trained_parameters" in start:
            rows.append(("trained parameters", shown(start["trained_parameters"])))
        of_steps = f" of {start['steps']:,}"
        if parallel := start.get("parallel"):  # absent from older runs
            named = ", ".join(f"{name} {ways}" for name, ways in parallel.items())
            rows.append(("processes, last session", named))
    if steps:
        # Steps that were not logged may follow the last logged one.
        last = max(steps[-1] | of_kind.get("end", [{}])[-1], steps[-1], key=lambda one: one["step"])
        warm = [event for event in steps if not event.get("warming_up")] or steps
        speed = median(event["tokens_per_second"] for event in warm)
        rows += [
            ("steps", f"{last['step']:,}{of_steps}"),
            ("tokens trained on", shown(last["tokens"])),
            ("training time", duration(last["seconds"])),
            *asked(of_kind),
            *goodput(of_kind, last["seconds"]),
            ("tokens per second, median", f"{speed:,.0f}"),
        ]
    return [*rows, *memory(of_kind)]


def validated(last: Event, objective: type[ObjectiveConfig]) -> list[tuple[str, str]]:
    """Return the results of a validation, each with its label."""
    part = "" if last.get("whole", True) else " on a subset"  # absent from older runs
    rows: list[tuple[str, str]] = []
    for name in dict.fromkeys((*objective.headline, "exact_match", "accuracy")):
        unit = f", {objective.loss_unit}" if name == "loss" and objective.loss_unit else ""
        if name in last:
            value = "not finite" if last[name] is None else f"{last[name]:.4f}"
            rows.append((f"validation {name.replace('_', ' ')}{part}{unit}", value))
    if last.get("bits_per_byte") is not None:
        rows.append(
            ("validation bits per byte, counting bos and eos", f"{last['bits_per_byte']:.4f}")
        )
    if unknown := last.get("unknown_rate"):  # absent from older runs
        rows.append(("unknown validation tokens: loss is too low", f"{unknown:.2%}"))
    return rows


def asked(of_kind: dict[str, list[Event]]) -> list[tuple[str, str]]:
    """Compare the time of the run with `train.minutes`, if it was started with that setting."""
    minutes = [event["minutes"] for event in of_kind.get("start", []) if "minutes" in event]
    ends = [event["seconds"] for event in of_kind.get("end", []) if "seconds" in event]
    if not minutes or not ends:
        return []
    took = f"{duration(ends[-1])} of {duration(minutes[0] * MINUTE)}"
    return [("total time of train.minutes", took)]


def memory(of_kind: dict[str, list[Event]]) -> list[tuple[str, str]]:
    """Return the range of the processes' peak memory, in the session that needed most."""
    ends = [event["peak_memory"] for event in of_kind.get("end", []) if "peak_memory" in event]
    peaks = sorted(max(ends, key=max, default=[0]))
    if not peaks[-1]:  # an older run, or a system that does not report memory
        return []
    each = " each" if len(peaks) > 1 else ""
    most = size(peaks[-1])
    shown_peaks = most if size(peaks[0]) == most else f"{size(peaks[0])} to {most}"
    return [("peak memory", shown_peaks + each)]


def goodput(of_kind: dict[str, list[Event]], useful: float) -> list[tuple[str, str]]:
    """Return the fraction of the run's time that was spent in steps, if a session was killed.

    The whole time includes lost steps and the time from a kill to the next start, but not the time
    after a normal end. The result is empty if no session was killed.
    """
    marks = [
        (event["time"], kind)
        for kind in ("start", "end")
        for event in of_kind.get(kind, [])
        if "time" in event  # absent from older runs
    ]
    spent, killed = 0.0, False
    for (begin, kind), (end, following) in pairwise(sorted(marks)):
        if kind == "start":
            spent += end - begin
            killed |= following == "start"
    return [("goodput: useful part of the time", f"{useful / spent:.0%}")] if killed else []


def notes(of_kind: dict[str, list[Event]]) -> list[str]:
    """Return the notes that a reader needs before trusting the curves."""
    starts = of_kind.get("start", [])
    settings = starts[0].get("settings") if starts else None  # absent from older runs
    named = "this run differs from the recipe file and its description"
    lines = [f"{named}: {', '.join(settings)}"] if settings else []
    if skipped := of_kind.get("skipped_step"):
        where = ", ".join(str(event["step"]) for event in skipped[:10])
        lines.append(
            f"{counted(len(skipped), 'step')} skipped, as loss or gradient was not finite: {where}"
        )
    if not starts:
        lines.append("metrics.jsonl has no start event; removed lines are missing here too")
    if len(starts) > 1:
        resumed = ", ".join(str(event["step"]) for event in starts[1:])
        lines.append(f"resumed after step {resumed}")
    lines += [
        f"from step {event['step'] + 1:,}, {event['setting']} is "
        f"{json.dumps(event.get('now'))} instead of {json.dumps(event.get('before'))}"
        for event in of_kind.get("change", [])
    ]
    lines += [event["message"] for event in of_kind.get("back", [])]
    ends = of_kind.get("end", [])
    if not ends or ends[-1]["reason"] != "finished":
        lines.append("the run has not finished")
    return lines


def duration(seconds: float) -> str:
    """Format a time in its two largest units, from days to seconds."""
    if seconds < MINUTE - 0.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
