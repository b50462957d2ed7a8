"""The progress of a study on stderr: one bar on a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workhorse.cli.output import PLAIN_INTERVAL, one_line
from workhorse.cli.train_progress import duration

Event = dict[str, Any]
Show = Callable[[Event], None]


@contextmanager
def show_study() -> Iterator[Show]:
    """Yield a function that shows each event of a study on stderr."""
    with _live() if sys.stderr.isatty() else _plain() as show:
        yield show


@contextmanager
def _plain() -> Iterator[Show]:
    view = _View()
    last = time.monotonic()

    def show(event: Event) -> None:
        nonlocal last
        view.take(event)
        if line := view.line(event):
            print(line, file=sys.stderr, flush=True)
        elif event["kind"] == "step" and time.monotonic() - last > PLAIN_INTERVAL:
            last = time.monotonic()
            print(f"{view.how_far()}: {view.running()}", file=sys.stderr, flush=True)

    yield show


@contextmanager
def _live() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    view = _View()
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        task = bar.add_task("preparing", total=None, figures="")

        def show(event: Event) -> None:
            view.take(event)
            if view.total:
                bar.update(
                    task,
                    total=view.total,
                    completed=view.steps_done(),
                    description=view.how_far(),
                    figures=view.reading(event) or view.running(),
                )
            elif reading := view.reading(event):
                bar.update(task, figures=reading)
            if line := view.line(event):
                bar.console.print(Text(line))

        yield show


class _View:
    """The state of a study, updated from its events and formatted as lines of text."""

    def __init__(self) -> None:
        self.trials = self.done = self.total = self.finished = 0
        self.steps: dict[str, int] = {}
        self.losses: dict[str, float] = {}
        self.began = time.monotonic()
        self.before: int | None = None
        self.told: set[str] = set()

    def take(self, event: Event) -> None:
        """Update the state of the study from an event."""
        match event["kind"]:
            case "plan":
                self.trials, self.done = event["trials"], event["done"]
                self.total, self.finished = event["steps"], event["steps_done"]
                self.began = time.monotonic()
            case "start":
                self.steps[event["trial"]] = event["step"]
                if self.before is None:
                    self.before = self.steps_done()
            case "step":
                self.steps[event["trial"]] = event["step"]
                self.losses[event["trial"]] = event["loss"]
            case "end_of_trial":
                self.steps.pop(event["trial"], None)
                self.losses.pop(event["trial"], None)
                self.finished += event["steps"]
                self.done += 1

    def reading(self, event: Event) -> str:
        """Format the amount of text read so far; empty if the event is not about reading text."""
        return f"{event['done'] / 1e6:,.1f} MB of text" if event["kind"] == "data" else ""

    def steps_done(self) -> int:
        return self.finished + sum(self.steps.values())

    def how_far(self) -> str:
        return f"{self.done} of {self.trials} trials"

    def running(self) -> str:
        """The running trials with step and loss, and the remaining time of the study."""
        parts = [
            f"{trial}: step {step:,}"
            + (f", loss {self.losses[trial]:.4f}" if trial in self.losses else "")
            for trial, step in self.steps.items()
        ]
        done = self.steps_done() - (self.before or 0)
        if done > 0 and self.total:
            seconds = (time.monotonic() - self.began) / done * (self.total - self.steps_done())
            parts.append(f"{duration(seconds)} left")
        return "; ".join(parts)

    def line(self, event: Event) -> str:
        """The line to print for an event; empty for events that only change the progress bar."""
        match event["kind"]:
            case "plan" if event["done"]:
                return f"resuming: {event['done']} of {event['trials']} trials are done"
            case "notice" if event["message"] not in self.told:  # all trials may send the same one
                self.told.add(event["message"])
                return one_line(event["message"])
            case "end_of_trial":
                if event.get("diverged"):
                    found = event["diverged"]
                else:
                    found = f"held-out loss {event['loss']:.4f}"
                return f"{self.how_far()}: {event['trial']}: {found}, {duration(event['seconds'])}"
            case _:
                return ""
