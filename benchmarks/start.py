"""Start-up: seconds from a command to its end, beside peers.

    python -m benchmarks.start

Whole processes are timed, including the interpreter's start. `import torch` is the minimum for any
command that computes something.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.command import main, parser
from benchmarks.harness.contest import Case
from benchmarks.harness.worker import Contestant, MissingError, Round

COMMANDS = (
    ("workhorse --help", ("workhorse", "--help")),
    ("python -c pass", (sys.executable, "-c", "pass")),
    ("import torch", (sys.executable, "-c", "import torch")),
    ("transformers --help", ("transformers", "--help")),
    ("litgpt --help", (sys.executable, "-m", "litgpt", "--help")),
)


def process(command: list[str], threads: int) -> Round:
    """Rounds of running a command to its end, after one that fills the caches."""
    del threads
    beside = Path(sys.executable).parent / command[0]
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise MissingError(f"the command {command[0]} is not installed")
    arguments = [program, *command[1:]]
    first = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if first.returncode:
        raise MissingError((first.stderr.strip() or "failed").splitlines()[-1])

    def take() -> dict[str, float]:
        started = time.perf_counter()
        subprocess.run(arguments, capture_output=True, check=True)
        return {"seconds": time.perf_counter() - started}

    return take


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One case with all commands."""
    del options
    contestants = tuple(
        Contestant(name, "benchmarks.start:process", {"command": list(command)})
        for name, command in COMMANDS
    )
    yield Case("help", "seconds", "s", contestants, peaks=False)


if __name__ == "__main__":
    main("start", cases, parser(__doc__ or "").parse_args())
