"""The progress of a training run on stderr: a live line on a terminal, otherwise plain lines."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from workhorse.cli.output import progress_lines

TERMS = {"z_loss": "z-loss", "balance_loss": "balance loss"}
"""Displayed name of each optional term of the training loss, by its key in the event of a step."""
Event = dict[str, Any]
Show = Callable[[Event], None]


@contextmanager
def show_training(steps: int | None, headline: Sequence[str] = ("loss",)) -> Iterator[Show]:
    """Yield a function that shows each event of a training run on stderr.

    Args:
        steps: the run's total number of steps; None if it is not known yet.
        headline: the keys of the figures to show, see `ObjectiveConfig`.
    """
    view = _View(steps, headline)
    with _live(view) if sys.stderr.isatty() else _plain(view) as show:
        yield show


@contextmanager
def _plain(view: "_View") -> Iterator[Show]:

    def show(event: Event) -> None:
        line = view.step_line(event) if event["kind"] == "step" else view.line(event)
        if line:
            print(line, file=sys.stderr, flush=True)
        elif event["kind"] == "data":
            tokenizing(event["done"], event["total"])

    with progress_lines("tokenizing", "bytes") as tokenizing:
        yield show


@contextmanager
def _live(view: "_View") -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[figures]}")
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing", total=view.steps, figures="")

        def show(event: Event) -> None:
            if event["kind"] == "step":
                step, figures = view.step_line(event).split(": ", 1)
                bar.update(task, completed=event["step"], description=step, figures=figures)
            elif event["kind"] == "data":
                bar.update(
                    task,
                    description="reading text",
                    completed=event["done"],
                    total=event["total"] or None,
                    figures=f"{event['done'] / 1e6:,.1f} MB",
                )
            elif event["kind"] == "start":
                done, total = event["step"], event["steps"]
                bar.update(task, description="starting", completed=done, total=total, figures="")
            if event["kind"] != "step" and (line := view.line(event)):
                bar.console.print(Text(line))

        yield show


class _View:
    """Formats the events of a training run as lines of text."""

    def __init__(self, steps: int | None, headline: Sequence[str]) -> None:
        self.steps = steps
        self.headline = headline

    def step_line(self, event: Event) -> str:
        """The line for a `step` event: step, headline figures, speed and remaining time."""
        speed = event["tokens_per_second"]
        assert self.steps is not None
        # Steps of conversations have fewer predicted tokens than positions, so count the tokens.
        left = math.inf  # a step of policy gradients may ignore all completions
        if speed:
            left = (self.steps - event["step"]) * event["tokens"] / event["step"] / speed
        skipped = f", {event['skipped_steps']} skipped" if event["skipped_steps"] else ""
        terms = "".join(
            f", {name} {event[key]:.2g}"
            for key, name in TERMS.items()
            if event.get(key) is not None
        )
        of_peak = (
            "warming up" if event.get("warming_up") else f"{event['peak_fraction']:.0%} of peak"
        )
        return (
            f"step {event['step']:,}/{self.steps:,}: "
            f"{headlines(event, self.headline)}{terms}, "
            f"{speed:,.0f} tokens/s ({of_peak}), {duration(left)} left{skipped}"
        )

    def line(self, event: Event) -> str:
        """The line for an event that is not a `step`; empty for events that are not shown."""
        match event["kind"]:
            case "notice" | "back":
                return event["message"]
            case "start":
                from workhorse.train.report.chart import shown

                self.steps = event["steps"]
                goes_on = 0 < event["step"] < self.steps
                after = f", resuming after step {event['step']:,}" if goes_on else ""
                active = event.get("active_parameters", event["parameters"])
                counts = [f"{active:,} active"] if active != event["parameters"] else []
                if "trained_parameters" in event:
                    counts.append(f"{event['trained_parameters']:,} trained")
                parts = f" ({', '.join(counts)})" if counts else ""
                held_out = event["validation_tokens"]
                beside = f" and {held_out:,} held out" if held_out else ""
                return (
                    f"{event['parameters']:,} parameters{parts}, {event['train_tokens']:,} tokens "
                    f"of text{beside}, {event['device']} with a peak of "
                    f"{shown(event['peak_flops'])} FLOP/s in matmuls{after}"
                )
            case "validation":
                part = "" if event["whole"] else " on a subset"
                bits = event["bits_per_byte"]
                other = "" if bits is None else f", {bits_per_byte(bits, event['unknown_rate'])}"
                figures = headlines(event, self.headline)
                return f"step {event['step']:,}: validation {figures}{part}{other}"
            case "samples":
                texts = (f"  {sample['prompt']}|{sample['text']}" for sample in event["samples"])
                return "\n".join([f"step {event['step']:,}, samples:", *texts])
            case "skipped_step":
                return (
                    f"step {event['step']:,} skipped: loss {event['loss']:g}, "
                    f"gradient norm {event['grad_norm']:g}"
                )
            case _:
                return ""


def headlines(figures: Mapping[str, float | None], names: Sequence[str]) -> str:
    """Format the figures with these names: `loss 1.2345, margin 9.30`; missing ones are omitted."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_figure(name, value)}"
        for name in names
        if (value := figures.get(name)) is not None
    )


def _figure(name: str, value: float) -> str:
    if name == "loss":
        return f"{value:.4f}"
    return f"{value:.2f}" if value == 0 or 0.1 <= abs(value) < 1e6 else f"{value:.2g}"  # noqa: PLR2004


def bits_per_byte(bits: float, unknown_rate: float | None) -> str:
    """Format a loss in bits per byte, with a note if unknown tokens make it too low."""
    note = f" (too low: {unknown_rate:.2%} of the tokens are unknown)" if unknown_rate else ""
    return f"{bits:.4f} bits per byte{note}"


def duration(seconds: float) -> str:
    """Format seconds as `m:ss` or `h:mm:ss`; `?` if they are not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
