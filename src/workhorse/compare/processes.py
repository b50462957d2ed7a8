"""Several trials at once, each in a process of its own: `workhorse.compare.worker`."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from workhorse.compare.plan import Trial
from workhorse.compare.worker import Job
from workhorse.errors import WorkhorseError
from workhorse.train import Event, Recipe
from workhorse.train.loop import StopSignals

WAKE = 0.1
"""Seconds between two looks at the signals."""


@dataclass
class _Worker:
    """A process with its trial, and a file of what it says on its standard error."""

    trial: Trial
    process: subprocess.Popen[str]
    errors: IO[str]
    reader: threading.Thread | None = None

    def stop(self, received: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(received)

    def leave(self) -> None:
        """End its standard input, upon which it saves and stops."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended."""
        assert self.process.stdout is not None
        self.process.wait()
        self.leave()
        if self.reader is not None:
            self.reader.join()
        self.process.stdout.close()

    def why(self) -> Exception:
        """Why it ended without saying so."""
        self.errors.seek(0)
        said = self.errors.read()
        code = self.process.returncode
        if code < 0:
            return WorkhorseError(
                f"the process of {self.trial} was ended by {signal.Signals(-code).name}, perhaps "
                "for want of memory; give the same command again to go on, with fewer --jobs"
            )
        return RuntimeError(f"the process of {self.trial} failed:\n{said}")


Events = queue.SimpleQueue[tuple[_Worker, Event | None]]
"""Of all processes; None: one ended without its last event."""


def run_in_processes(
    trials: Iterable[tuple[Trial, Recipe, Path]],
    jobs: int,
    contexts: Sequence[int],
    *,
    on_event: Callable[[Trial, Event], None],
    on_end: Callable[[Trial], None],
    signals: StopSignals,
) -> str | None:
    """Run trials, `jobs` at once.

    Args:
        trials: each with its recipe and its run directory.
        jobs: processes at once.
        contexts: at which final models are measured too, in tokens.
        on_event: called with the events of every trial.
        on_end: called when one is finished.
        signals: are passed on to the processes, which save and stop.

    Returns:
        The name of the signal that stopped them after saving; None: all are finished.

    Raises:
        WorkhorseError: one cannot be trained; the others are saved and stopped.
    """
    jobs_of = [
        (trial, {"recipe": recipe.to_dict(), "out": str(out), "contexts": list(contexts)})
        for trial, recipe, out in trials
    ]
    pool = _Pool(jobs_of, jobs, on_event, on_end)
    try:
        with signals:
            while pool.running or (pool.waiting and signals.received is None):
                if signals.received is None:
                    pool.fill()
                else:
                    pool.stop(signals.received)
                pool.listen()
    finally:
        pool.end()
    return pool.stopped


class _Pool:
    """The processes that run, and the trials that wait for one."""

    def __init__(
        self,
        waiting: list[tuple[Trial, Job]],
        jobs: int,
        on_event: Callable[[Trial, Event], None],
        on_end: Callable[[Trial], None],
    ) -> None:
        self.waiting, self.jobs = waiting, jobs
        self.on_event, self.on_end = on_event, on_end
        self.running: list[_Worker] = []
        self.stopped: str | None = None
        self.events: Events = queue.SimpleQueue()

    def fill(self) -> None:
        """Start as many as may run."""
        while self.waiting and len(self.running) < self.jobs:
            worker = _start(*self.waiting.pop(0), self.events)
            self.running.append(worker)
            self.on_event(worker.trial, {"kind": "begin"})

    def stop(self, received: signal.Signals) -> None:
        """Pass on a signal, once: a second one would not let them save."""
        if self.stopped is None:
            self.stopped = received.name
            for worker in self.running:
                worker.stop(received)

    def listen(self) -> None:
        """Take in the next event, if one comes soon."""
        try:
            worker, event = self.events.get(timeout=WAKE)
        except queue.Empty:
            return
        if event is not None and event["kind"] != "ended":
            self.on_event(worker.trial, event)
            return
        self.running.remove(worker)
        worker.wait()
        if event is None and self.stopped is not None:
            worker.errors.close()
            return  # it was stopped before it could catch the signal
        stopped_by = _stopped_by(worker, event)
        if stopped_by is None:
            self.on_end(worker.trial)
        self.stopped = self.stopped or stopped_by

    def end(self) -> None:
        """After an error or a second signal: let those that still run save and stop."""
        for worker in self.running:
            worker.leave()
        for worker in self.running:
            worker.wait()
            worker.errors.close()


def _stopped_by(worker: _Worker, event: Event | None) -> str | None:
    """The name of the signal after which a process saved and ended; raises what made it fail."""
    with worker.errors:
        if event is None:
            raise worker.why()
    if event["error"] is not None:
        raise WorkhorseError(f"{worker.trial}: {event['error']}")
    return event["stopped_by"]


def _start(trial: Trial, job: Job, events: Events) -> _Worker:
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "workhorse.compare.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # a terminal's Ctrl-C reaches us, and we tell them once
    )
    worker = _Worker(trial, process, errors)
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    worker.reader = threading.Thread(target=_read, args=(worker, events), daemon=True)
    worker.reader.start()
    return worker


def _read(worker: _Worker, events: Events) -> None:
    """Pass on a process's events; None if it ends without the last one."""
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        event = json.loads(line)
        events.put((worker, event))
        if event["kind"] == "ended":
            return
    events.put((worker, None))
