"""A process with one trial: `python -m workhorse.compare.worker`, which `processes.py` starts.

It reads one line of JSON, the trial, from its standard input and writes events to its standard
output, a line of JSON each; the last is of kind `ended`. When its standard input ends, whoever
started it is gone: it saves and stops.
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
"""What a process is to do: a `recipe`, where (`out`), and the `contexts` to measure it at."""
TOLD = ("start", "step", "validation", "notice", "data")
"""Kinds of event that are passed on."""


def main() -> None:
    """Run the trial that stands on the standard input."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints does not disturb
    job: Job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_when_alone, daemon=True).start()

    def say(event: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more: save, do not fail
            out.write(json.dumps(event) + "\n")
            out.flush()

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] in TOLD:
            say(event)

    ended: dict[str, Any] = {"kind": "ended", "stopped_by": None, "error": None}
    try:
        recipe = Recipe.from_dict(job["recipe"])
        with keep_freed_memory():  # of this process, which trains nothing else
            ended["stopped_by"] = run_trial(
                recipe,
                Path(job["out"]),
                tell,
                contexts=job["contexts"],
                signals=StopSignals(),
            )
    except WorkhorseError as error:
        ended["error"] = str(error)
    say(ended)


def _stop_when_alone() -> None:
    """Ask for an orderly stop when the standard input ends."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
