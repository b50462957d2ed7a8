"""A process that runs one trial: `python -m workhorse.compare.worker`, started by `processes.py`.

The process reads its job from stdin as one line of JSON and writes events to stdout, one line of
JSON each. The last event is of kind `ended`. When the parent process closes stdin or exits, the
process saves and stops.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from workhorse.compare.trials import run_trial
from workhorse.errors import WorkhorseError
from workhorse.native.allocator import keep_freed_memory
from workhorse.train import Recipe, StopSignals

Job = dict[str, Any]
"""The job of a process: the trial's `recipe`, its run directory `out`, and the context lengths
(`contexts`) at which the final model is also evaluated."""
TOLD = ("start", "step", "validation", "notice", "data")
"""Kinds of training events that are sent to the parent process."""


def main() -> None:
    """Read a job from stdin, run its trial, and write the events to stdout."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other prints must not mix with the events
    job: Job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_when_alone, daemon=True).start()

    def say(event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent has exited: save instead of failing
            out.write(json.dumps(event) + "\n")
            out.flush()

    def notify(event: dict[str, Any]) -> None:
        if event["kind"] in TOLD:
            say(event)

    ended: dict[str, Any] = {"kind": "ended", "stopped_by": None, "error": None}
    try:
        recipe = Recipe.from_dict(job["recipe"])
        with keep_freed_memory():  # safe, since this process trains nothing else
            ended["stopped_by"] = run_trial(
                recipe,
                Path(job["out"]),
                notify,
                contexts=job["contexts"],
                signals=StopSignals(),
            )
    except WorkhorseError as error:
        ended["error"] = str(error)
    say(ended)


def _stop_when_alone() -> None:
    """Wait until stdin is closed, then send SIGTERM to this process, so that it saves and stops."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
