"""A contestant in its own process, which runs a round on request and sleeps in between.

In separate processes, contestants cannot compete for a thread pool, patch each other's libraries,
or hide in each other's peak memory. A contestant is built by a function that returns its `Round`.
The two sides exchange lines of JSON. What the libraries print goes to a file, which is shown if
they fail.
"""

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Measures = dict[str, float]
Round = Callable[[], Measures]

SETTLE_SECONDS = 0.1
"""Pause between rounds, so that threads that wait by spinning have gone to sleep."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables that PyTorch, its libraries and `tokenizers` read when they start."""
TAIL = 2000


@dataclass(frozen=True)
class Contestant:
    """A participant: a name, and the `module:function` that builds it from JSON types."""

    name: str
    build: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """A note for readers of the results."""
    checkout: Path = Path(__file__).parents[2]
    """The checkout whose `benchmarks` and `workhorse` it runs."""


class MissingError(Exception):
    """A contestant cannot take part here; the message is the reason in one line."""


class Worker:
    """The process of one contestant, built and warm.

    Args:
        contestant: the contestant.
        threads: size of each of its thread pools.

    Attributes:
        build_seconds: seconds from the start of the process to its first round, including
            compilation.

    Raises:
        MissingError: a package that it needs is not installed.
        RuntimeError: it failed.
    """

    def __init__(self, contestant: Contestant, threads: int) -> None:
        self.contestant = contestant
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.worker", contestant.build, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=contestant.checkout,
            env=os.environ | dict.fromkeys(THREADS, str(threads)) | _path(contestant.checkout),
        )
        self.peak_bytes = 0
        self._asked = False
        try:
            self.build_seconds: float = self._ask(dict(contestant.arguments))["seconds"]
        except BaseException:
            self.close()
            raise

    def round(self) -> Measures:
        """Measures of one round, including `idle`.

        `idle` is the processor time, in cores, used since the last round: it should be almost 0.
        """
        time.sleep(SETTLE_SECONDS)
        answer = self._ask({})
        self.peak_bytes = answer["peak_bytes"]
        return answer["measures"] | {"idle": answer["idle"]}

    def close(self) -> None:
        """End the process; kill it if a request is still open."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._asked:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        self._asked = False
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-TAIL:]
            raise RuntimeError(f"{self.contestant.name} failed:\n{said}")
        answer = json.loads(line)
        if "missing" in answer:
            raise MissingError(answer["missing"])
        return answer


def _path(checkout: Path) -> dict[str, str]:
    """`PYTHONPATH` with the checkout's sources first."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), *([given] if given else [])])}


def serve(build: str, threads: int) -> None:
    """The process's side: build from the first line, then run a round for every further line."""
    started = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    module, _, function = build.partition(":")
    try:
        arguments = json.loads(sys.stdin.readline())
        take: Round = getattr(importlib.import_module(module), function)(
            **arguments, threads=threads
        )
    except ModuleNotFoundError as error:
        answer(missing=f"the package {error.name} is not installed")
        return
    except MissingError as error:
        answer(missing=str(error))
        return
    answer(seconds=time.perf_counter() - started)
    # Idle time is not measured right after the build: threads and compilers are still stopping.
    idle_since, idle_cpu = None, 0.0
    for _ in sys.stdin:
        idle = 0.0
        if idle_since is not None:
            idle = (time.process_time() - idle_cpu) / (time.perf_counter() - idle_since)
        measures = take()
        idle_since, idle_cpu = time.perf_counter(), time.process_time()
        answer(measures=measures, idle=idle, peak_bytes=peak_bytes())


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    with contextlib.suppress(OSError, StopIteration):
        # Not `ru_maxrss`, which on Linux begins with the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    # Import the module by name: contestants raise that module's MissingError, not this script's.
    importlib.import_module("benchmarks.harness.worker").serve(sys.argv[1], int(sys.argv[2]))
