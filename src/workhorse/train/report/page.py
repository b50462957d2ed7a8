"""`report.html`: the report of a run, in one file that needs no network."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined

from workhorse.checkpoints import RunDirectory
from workhorse.devices.memory import size
from workhorse.files.writing import write_atomically
from workhorse.train.report.chart import Series, line_chart, shown
from workhorse.train.report.metrics import Event, read_metrics

LOAD_MAX, LOAD_ENTROPY = "expert_load_max", "expert_load_entropy"
SAMPLED_TIMES = 4
"""Number of sets of samples on the page: the first, the last, and others in between."""
NOT_SHOWN = ("kind", "step", "name", "time", "peak_flops")
"""Keys of a `start` event that the page shows elsewhere or under another name."""
MINUTE = 60


def write_report(run: RunDirectory) -> None:
    """Write the report of a run from its metrics, replacing an earlier one.

    Raises:
        WorkhorseError: the disk is full or cannot be written.
    """
    page = rendered("workhorse.train.report", "page.html", **contents(run))
    write_atomically(run.report_file, page)


def rendered(package: str, template: str, *, title: str, **contents: Any) -> str:
    """Render a template of a package, with the head that all pages share."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    ours = files("workhorse.train.report")
    style = ours.joinpath("style.css").read_text("utf-8")
    head = ours.joinpath("head.html").read_text("utf-8")
    page = head + files(package).joinpath(template).read_text("utf-8")
    return environment.from_string(page).render(style=style, title=title, **contents)


def contents(run: RunDirectory) -> dict[str, Any]:
    """Return the data of the page's template, from the files in the run directory."""
    events = read_metrics(run.metrics_file)
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        of_kind.setdefault(event["kind"], []).append(event)
    recipe = run.recipe()
    starts = of_kind.get("start", [{}])
    return {
        "title": recipe["name"],
        "description": reflowed(recipe.get("description", "")),
        "settings": starts[0].get("settings", []),  # absent from older runs
        "figures": figures(of_kind),
        "charts": [chart for chart in charts(of_kind) if chart],
        "experts": experts(of_kind),
        "samples": chosen(of_kind.get("samples", [])),
        "notes": notes(of_kind),
        "recipe": run.recipe_file.read_text("utf-8"),
        "config": run.config_file.read_text("utf-8"),
        "environment": environment(starts[-1]),
    }


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


def figures(of_kind: dict[str, list[Event]]) -> list[tuple[str, str]]:
    """Return the key figures of the run, each with its label."""
    steps = of_kind.get("step", [])
    rows: list[tuple[str, str]] = []
    of_steps = ""
    if starts := of_kind.get("start"):
        start = starts[-1]
        rows.append(("parameters", shown(start["parameters"])))
        active = start.get("active_parameters", start["parameters"])  # absent from older runs
        if active != start["parameters"]:
            rows.append(("active parameters per token", shown(active)))
        of_steps = f" of {start['steps']:,}"
        if parallel := start.get("parallel"):  # absent from older runs
            named = ", ".join(f"{name} {ways}" for name, ways in parallel.items())
            rows.append(("processes, last session", named))
    if validations := of_kind.get("validation"):
        last = validations[-1]
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
        part = "" if _is_whole(last) else " on a subset"
        rows.append((f"validation loss{part}, nats per token", loss))
        if last["bits_per_byte"] is not None:
            rows.append(
                (
                    "validation bits per byte, counting bos and eos",
                    f"{last['bits_per_byte']:.4f}",
                )
            )
        if unknown := last.get("unknown_rate"):  # absent from older runs
            rows.append(("unknown validation tokens: loss is too low", f"{unknown:.2%}"))
    if steps:
        last = steps[-1]
        warm = [event for event in steps if not event.get("warming_up")] or steps
        speeds = sorted(event["tokens_per_second"] for event in warm)
        peak = sorted(event["peak_fraction"] for event in warm)
        rows += [
            ("steps", f"{last['step']:,}{of_steps}"),
            ("tokens trained on", shown(last["tokens"])),
            ("training time", duration(last["seconds"])),
            *asked(of_kind),
            *goodput(of_kind, last["seconds"]),
            ("tokens per second, median", f"{speeds[len(speeds) // 2]:,.0f}"),
            ("of peak matmul rate, median", f"{peak[len(peak) // 2]:.0%}"),
        ]
    return [*rows, *memory(of_kind), *slowest(steps)]


def asked(of_kind: dict[str, list[Event]]) -> list[tuple[str, str]]:
    """Compare the time of the run with `train.minutes`, if it was started with that setting."""
    minutes = next(
        (event["minutes"] for event in of_kind.get("start", []) if "minutes" in event), 0
    )
    ends = [event["seconds"] for event in of_kind.get("end", []) if "seconds" in event]
    if not minutes or not ends:
        return []
    took = f"{duration(ends[-1])} of {duration(minutes * MINUTE)}"
    return [("total time of train.minutes", took)]


def slowest(steps: list[Event]) -> list[tuple[str, str]]:
    """Return the rank with the slowest passes, and the median of all ranks."""
    timed = [event["pass_seconds"] for event in steps if "pass_seconds" in event]
    if not timed or len(timed[-1]) == 1:
        return []
    last = [
        one for one in timed if len(one) == len(timed[-1])
    ]  # the number of processes may have changed
    means = [sum(times) / len(last) for times in zip(*last, strict=True)]
    longest, median = max(means), sorted(means)[(len(means) - 1) // 2]
    said = f"rank {means.index(longest)}, {longest:.3g} s per step; median {median:.3g} s"
    return [("slowest rank", said)]


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


def experts(of_kind: dict[str, list[Event]]) -> list[tuple[str, str, str]]:
    """Return each mixture's number, load of the busiest expert, and entropy of the loads.

    The values are from the last logged step.
    """
    last = next(iter(of_kind.get("step", [])[-1:]), {})
    return [
        (str(number), f"{busiest:.2f} × the mean", f"{entropy:.1%}")
        for number, (busiest, entropy) in enumerate(
            zip(last.get(LOAD_MAX, []), last.get(LOAD_ENTROPY, []), strict=True), start=1
        )
    ]


def charts(of_kind: dict[str, list[Event]]) -> list[str]:
    """Return the charts as SVG elements; empty strings for values that were not measured."""
    steps, validations = of_kind.get("step", []), of_kind.get("validation", [])
    return [
        line_chart(
            "Loss, nats per token",
            [series("training", steps, "loss"), *validation_series(validations, "loss")],
        ),
        line_chart(
            "Auxiliary losses",
            [
                series("z-loss", steps, "z_loss"),
                series("balance loss", steps, "balance_loss"),
            ],
        ),
        line_chart("Bits per byte", validation_series(validations, "bits_per_byte")),
        line_chart("Learning rate", [series("", steps, "learning_rate")]),
        line_chart("Gradient norm", [series("", steps, "grad_norm")]),
        line_chart("Tokens per second", [series("", steps, "tokens_per_second")]),
        line_chart(
            "Busiest expert, load / mean load",
            [
                over_mixtures("worst mixture", steps, LOAD_MAX, max),
                over_mixtures("median", steps, LOAD_MAX, median),
            ],
        ),
        line_chart(
            "Entropy of the experts' loads, 1 = even",
            [
                over_mixtures("worst mixture", steps, LOAD_ENTROPY, min),
                over_mixtures("median", steps, LOAD_ENTROPY, median),
            ],
        ),
    ]


def series(name: str, events: list[Event], key: str) -> Series:
    """Return one value of each event as points over the steps, without null (non-finite) values."""
    points = [(event["step"], event[key]) for event in events if event.get(key) is not None]
    return Series(name, points)


def validation_series(events: list[Event], key: str) -> list[Series]:
    """Collect a value of the validations: one line for subsets, one for the whole split."""
    parts = [event for event in events if not _is_whole(event)]
    whole = [event for event in events if _is_whole(event)]
    names = ("validation on a subset", "whole split") if parts else ("", "validation")
    lines = [series(name, some, key) for name, some in zip(names, (parts, whole), strict=True)]
    return [replace(line, marked=True) for line in lines if line.points]


def _is_whole(validation: Event) -> bool:
    return validation.get("whole", True)  # absent from older runs


def over_mixtures(
    name: str, events: list[Event], key: str, of: Callable[[list[float]], float]
) -> Series:
    """Return a line over the steps of the values at `key`, a list with one value per mixture.

    The function `of` combines the values of the mixtures.
    """
    return Series(name, [(event["step"], of(event[key])) for event in events if event.get(key)])


def chosen(events: list[Event]) -> list[Event]:
    """Select a few sets of samples, evenly spread, including the first and the last."""
    if len(events) <= SAMPLED_TIMES:
        return events
    last = len(events) - 1
    return [events[round(place * last / (SAMPLED_TIMES - 1))] for place in range(SAMPLED_TIMES)]


def notes(of_kind: dict[str, list[Event]]) -> list[str]:
    """Return the notes that a reader needs before trusting the curves."""
    lines = []
    if skipped := of_kind.get("skipped_step"):
        where = ", ".join(str(event["step"]) for event in skipped[:10])
        lines.append(
            f"{len(skipped)} steps were skipped, as loss or gradient was not finite: {where}"
        )
    starts = of_kind.get("start", [])
    if not starts:
        lines.append("metrics.jsonl has no start event; removed lines are missing here too")
    if len(starts) > 1:
        resumed = ", ".join(str(event["step"]) for event in starts[1:])
        lines.append(f"resumed after step {resumed}")
    lines += [
        f"from step {event['step'] + 1:,}, {event['setting']} is "
        f"{json.dumps(event['now'])} instead of {json.dumps(event['before'])}"
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
