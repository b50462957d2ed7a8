"""Run several trials of a study in parallel, each in a process of `workhorse.compare.worker`."""

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
"""Seconds between two checks for signals."""


@dataclass
class _Worker:
    """A process that runs a trial, and a file that receives its stderr."""

    trial: Trial
    process: subprocess.Popen[str]
    errors: IO[str]
    reader: threading.Thread | None = None

    def leave(self) -> None:
        """Close the process's stdin, which makes it save and stop."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> None:
        """Wait until the process has exited."""
        assert self.process.stdout is not None
        self.process.wait()
        self.leave()
        if self.reader is not None:
            self.reader.join()
        self.process.stdout.close()

    def why(self) -> Exception:
        """The error for a process that failed: it exited without sending the event `ended`."""
        self.errors.seek(0)
        said = self.errors.read()
        code = self.process.returncode
        if code < 0:
            return WorkhorseError(
                f"the process of {self.trial} was killed by {signal.Signals(-code).name}, possibly "
                "out of memory; run the same command again with fewer --jobs to resume"
            )
        return RuntimeError(f"the process of {self.trial} failed:\n{said}")


Events = queue.SimpleQueue[tuple[_Worker, Event | None]]
"""Queue of processes and their events. An event of None means that the process exited without
sending `ended`, its normal last event."""


def run_in_processes(
    trials: Iterable[tuple[Trial, Recipe, Path]],
    jobs: int,
    contexts: Sequence[int],
    *,
    on_event: Callable[[Trial, Event], None],
    on_end: Callable[[Trial], None],
    signals: StopSignals,
) -> str | None:
    """Run trials of a study in up to `jobs` parallel processes.

    Args:
        trials: the trials, each with its recipe and its run directory.
        jobs: the number of parallel processes.
        contexts: context lengths in tokens at which final models are also evaluated.
        on_event: called with a trial and one of its events, for all events of all trials.
        on_end: called with each trial when it is finished.
        signals: signals that are forwarded to the processes, which then save and stop.

    Returns:
        The name of the signal that stopped the trials after saving; None if all trials are
        finished.

    Raises:
        WorkhorseError: a trial cannot be trained. The other trials are saved and stopped first.
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
    """The running processes, and the trials that wait for a free process."""

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
        """Start waiting trials until `jobs` processes are running."""
        while self.waiting and len(self.running) < self.jobs:
            worker = _start(*self.waiting.pop(0), self.events)
            self.running.append(worker)
            self.on_event(worker.trial, {"kind": "begin"})

    def stop(self, received: signal.Signals) -> None:
        """Forward the first received signal to all processes.

        Later signals are ignored, because they would prevent the processes from saving.
        """
        if self.stopped is None:
            self.stopped = received.name
            for worker in self.running:
                worker.process.send_signal(received)  # does nothing if the process has ended

    def listen(self) -> None:
        """Handle the next event of any process, if one arrives within `WAKE` seconds."""
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
            return  # the signal arrived before the process had installed its handler
        stopped_by = _stopped_by(worker, event)
        if stopped_by is None:
            self.on_end(worker.trial)
        self.stopped = self.stopped or stopped_by

    def end(self) -> None:
        """Let the running processes save and stop, after an error or a second signal."""
        for worker in self.running:
            worker.leave()
        for worker in self.running:
            worker.wait()
            worker.errors.close()


def _stopped_by(worker: _Worker, event: Event | None) -> str | None:
    """Handle the last event of a process: return the name of the signal that stopped it, or None.

    `event` is the event `ended`; None if the process exited without sending it.

    Raises:
        Exception: the error that the process reported or that ended it.
    """
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
        start_new_session=True,  # Ctrl-C must only reach the parent, which forwards it once
    )
    worker = _Worker(trial, process, errors)
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    worker.reader = threading.Thread(target=_read, args=(worker, events), daemon=True)
    worker.reader.start()
    return worker


def _read(worker: _Worker, events: Events) -> None:
    """Read a process's events and put them into the queue, until the event `ended`.

    If the process exits without `ended`, put None.
    """
    assert worker.process.stdout is not None
    for line in worker.process.stdout:
        event = json.loads(line)
        events.put((worker, event))
        if event["kind"] == "ended":
            return
    events.put((worker, None))
