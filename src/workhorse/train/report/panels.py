"""The charts of a report: a table of the known figures, and a chart for any other one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from workhorse.devices.memory import GIB, MIB
from workhorse.train.report.chart import Series, line_chart
from workhorse.train.report.metrics import Event


@dataclass(frozen=True)
class Figure:
    """A figure of `step` and `validation` events: where and how it is drawn."""

    group: str
    title: str
    """Title of the chart. Figures with the same title are drawn in one chart."""
    label: str = ""
    """Name of the line, if a chart has several figures or a figure has several values."""
    include: Sequence[float] = ()
    """Values that the vertical axis includes."""
    log: bool = False
    """True for a logarithmic axis if the values differ by orders of magnitude."""
    in_bytes: bool = False
    """True if the values are bytes. They are drawn in the unit of `size` for the largest one."""


LOSS, REWARDS, LENGTHS, RATIOS = "Loss", "Rewards", "Lengths", "KL and ratios"
OPTIMIZER, EXPERTS, SPEED, OTHER = "Optimizer", "Experts", "Speed and memory", "Other figures"
FIGURES = {
    "loss": Figure(LOSS, "Loss"),
    "bits_per_byte": Figure(LOSS, "Bits per byte"),
    "z_loss": Figure(LOSS, "Auxiliary losses", "z-loss"),
    "balance_loss": Figure(LOSS, "Auxiliary losses", "balance loss"),
    "value_loss": Figure(LOSS, "Auxiliary losses", "value loss"),
    "reward": Figure(REWARDS, "Reward"),
    "exact_match": Figure(REWARDS, "Completions equal to the answer", include=(0, 1)),
    "reward_std": Figure(REWARDS, "Standard deviation of rewards", include=(0,)),
    "equal_rewards": Figure(REWARDS, "Prompts with equal rewards", include=(0, 1)),
    "accuracy": Figure(REWARDS, "Accuracy of preferences", include=(0, 1)),
    "margin": Figure(REWARDS, "Margin of rewards", include=(0,)),
    "reward_chosen": Figure(REWARDS, "Rewards of answers", "chosen"),
    "reward_rejected": Figure(REWARDS, "Rewards of answers", "rejected"),
    "logp_chosen": Figure(REWARDS, "Log-probability of answers", "chosen"),
    "logp_rejected": Figure(REWARDS, "Log-probability of answers", "rejected"),
    "reward_gain": Figure(REWARDS, "Gain in the direction of the labels", include=(0,)),
    "completion_tokens": Figure(LENGTHS, "Tokens per completion", "mean", (0,)),
    "longest_completion": Figure(LENGTHS, "Tokens per completion", "longest", (0,)),
    "right_tokens": Figure(LENGTHS, "Tokens per completion", "reward of 1 or more", (0,)),
    "wrong_tokens": Figure(LENGTHS, "Tokens per completion", "reward below 1", (0,)),
    "unfinished": Figure(LENGTHS, "Unfinished completions", include=(0, 1)),
    "kl": Figure(RATIOS, "KL from the reference, nats", include=(0,)),
    "kl_old": Figure(RATIOS, "KL from the sampling model, nats", log=True),
    "clip_fraction": Figure(RATIOS, "Fraction of clipped ratios", include=(0,)),
    "ratio_outside": Figure(RATIOS, "Fraction of ratios outside 0.9 to 1.1", include=(0,)),
    "entropy": Figure(RATIOS, "Entropy, nats per token", include=(0,)),
    "learning_rate": Figure(OPTIMIZER, "Learning rate", include=(0,)),
    "adamw.learning_rate": Figure(OPTIMIZER, "Learning rate, AdamW part", include=(0,)),
    "grad_norm": Figure(OPTIMIZER, "Gradient norm", log=True),
    "expert_load_max": Figure(EXPERTS, "Busiest expert, load / mean load", "mixture"),
    "expert_load_entropy": Figure(EXPERTS, "Entropy of the loads, 1 = even", "mixture"),
    "tokens_per_second": Figure(SPEED, "Tokens per second", include=(0,)),
    "peak_fraction": Figure(SPEED, "Fraction of the peak matmul rate", include=(0,)),
    "rollout_seconds": Figure(SPEED, "Seconds per step for completions", include=(0,)),
    "pass_seconds": Figure(SPEED, "Seconds per step in passes", "rank", (0,)),
    "memory": Figure(SPEED, "Peak memory", include=(0,), in_bytes=True),
}
"""The known figures, by their keys, in the order of the page."""
NOT_DRAWN = {"step", "tokens", "seconds", "skipped_steps", "unknown_rate", "warming_up", "whole"}
"""Keys of numbers and booleans that are not drawn."""
Parts = dict[str, list[tuple[int, Any]]]
"""Steps and values of a figure: of steps, of validations on a subset and on the whole split."""
MOST_LINES = 8
"""Lists with more values per step are drawn as a median and a band."""


def charts(
    runs: Mapping[str, list[Event]], loss_unit: str = "", first: str = "loss"
) -> dict[str, list[str]]:
    """Return the charts of one or several runs as HTML elements, by group.

    With several runs, each chart has one figure, and each run has its color.

    Args:
        runs: the events of each run, by its name.
        loss_unit: the unit of the loss.
        first: the key of the figure whose group comes first.
    """
    several = len(runs) > 1
    logged = {run: logged_figures(events) for run, events in runs.items()}
    names = dict.fromkeys(name for figures in logged.values() for name in figures)
    others = {name: Figure(OTHER, name.replace("_", " ")) for name in names if name not in FIGURES}
    panels: dict[str, tuple[Figure, list[Series]]] = {}
    for name, figure in (FIGURES | others).items():
        title = f"{figure.title}, {loss_unit}" if name == "loss" and loss_unit else figure.title
        if several and figure.label:
            title += f", {figure.label}"
        unit = 1
        if figure.in_bytes:
            parts = (part for one in logged.values() for part in one.get(name, {}).values())
            most = max((y for part in parts for _, y in part), default=0)
            unit = GIB if most >= GIB else MIB
            title += ", GiB" if unit == GIB else ", MiB"
        _, lines = panels.setdefault(title, (figure, []))
        before = len({line.color for line in lines})
        for place, (run, figures) in enumerate(logged.items()):
            for line in lines_of(figures.get(name, {}), run if several else figure.label):
                own = before if figure.label and line.color is None else line.color
                points = [(x, y / unit) for x, y in line.points]
                lines.append(replace(line, points=points, color=place if several else own))
    groups: dict[str, list[str]] = {FIGURES[first].group: []}
    for title, (figure, lines) in panels.items():
        if chart := line_chart(title, lines, include=figure.include, log=figure.log):
            groups.setdefault(figure.group, []).append(chart)
    return {group: found for group, found in groups.items() if found}


def logged_figures(events: Sequence[Event]) -> dict[str, Parts]:
    """Return the figures of `step` and `validation` events, by key."""
    found: dict[str, Parts] = {}
    for event in sorted(events, key=lambda event: event["kind"]):
        part = event["kind"] if event.get("whole", True) else "validation on a subset"
        for name, value in event.items() if event["kind"] in ("step", "validation") else ():
            values = value if isinstance(value, list) else [value]
            if name not in NOT_DRAWN and all(isinstance(one, float | int) for one in values):
                found.setdefault(name, {}).setdefault(part, []).append((event["step"], value))
    return found


def lines_of(parts: Parts, label: str) -> Iterator[Series]:
    """Yield the lines of a figure; `label` is its name or the name of its run, or empty."""
    for part, points in parts.items():
        of_training = "" if label or len(parts) == 1 else "training"
        name = f"{label} {of_training if part == 'step' else part}".strip()
        if isinstance(points[-1][1], list):
            yield from _of_lists(name, points)
        else:
            yield Series(name, points, marked=part != "step")


def _of_lists(name: str, points: Sequence[tuple[int, list[float]]]) -> Iterator[Series]:
    """Yield a line for each element of the lists, or a median with a band for long lists."""
    size = len(points[-1][1])
    points = [(step, values) for step, values in points if len(values) == size]
    if size > MOST_LINES:
        line = [(step, median(values)) for step, values in points]
        band = [(step, min(values), max(values)) for step, values in points]
        yield Series(f"median {name}, lowest to highest", line, band=band)
        return
    for index in range(size):
        line = [(step, values[index]) for step, values in points]
        yield Series(f"{name} {index}", line, color=index)
