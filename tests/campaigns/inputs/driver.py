"""Runs attempts, each in a fork of this process, and prints a JSON line for each.

    python driver.py PLACE < ATTEMPTS

PLACE is the workplace. It is restored from the copy `PLACE.sound` next to it. Each line of ATTEMPTS
is an `Attempt`. A fork starts with everything imported, so that thousands of attempts take minutes.
It has its own memory, time and file descriptors, and this process observes how it ends.
"""

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import click

from tests.campaigns.inputs.attempt import Attempt
from tests.campaigns.inputs.workplace import state
from workhorse.cli import main as cli
from workhorse.cli.output import settle_streams

SECONDS = 60.0
"""Time after which an attempt counts as hanging; generous, for a busy machine."""
ADDRESSES = 6 << 30
"""Bytes of address space in addition to the driver's."""
SHOWN = 200_000


def warm_up(place: Path) -> None:
    """Import everything that verbs import, but start no threads: a fork would not have them."""
    for verb in cli.VERBS:
        cli.command.get_command(click.Context(cli.command), verb)
    for name in (
        "compare",
        "model.convert",
        "data",
        "evaluate",
        "evaluate.harness_model",
        "generate",
        "model.load",
        "models.describe",
        "tokenizers",
        "train",
        "train.validation",
    ):
        importlib.import_module(f"workhorse.{name}")
    for name in (
        *("gguf", "pyarrow.parquet", "rich.console", "rich.progress", "torch._dynamo"),
        *("transformers", "datasets", "lm_eval.tasks", "lm_eval.evaluator"),
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from workhorse.models import presets

    presets()


def execute(attempt: Attempt, place: Path, streams: tuple[int, int, int]) -> None:
    """Run the command in the fork; never returns."""
    code = 70  # a code that no command returns
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(place)
        warnings.resetwarnings()
        sys.argv = ["workhorse", *attempt.arguments]
        settle_streams()
        sys.exit(cli.main(attempt.arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def examine(attempt: Attempt, place: Path) -> dict[str, Any]:
    """Run an attempt and return its result."""
    attempt.prepare(place)
    before = state(place)
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(attempt.stdin.encode("utf-8", "surrogateescape"))
        given.seek(0)
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            execute(attempt, place, (given.fileno(), out.fileno(), err.fileno()))
        watch = os.pidfd_open(child)
        hangs = not select.select([watch], [], [], SECONDS)[0]
        if hangs:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        os.close(watch)
        seconds = time.perf_counter() - started
        out.seek(0)
        err.seek(0)
        said, complained = out.read(), err.read()
    after = state(place)
    return {
        "name": attempt.name,
        "code": None if hangs else os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 3),
        "bytes": usage.ru_maxrss * 1024,
        "stdout": said[:SHOWN].decode(errors="backslashreplace"),
        "stderr": complained[-SHOWN:].decode(errors="backslashreplace"),
        "changed": sorted(
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        ),
    }


def restore(place: Path) -> None:
    shutil.rmtree(place)
    copy(place.with_suffix(".sound"), place)


def copy(source: Path, target: Path) -> None:
    """Copy a folder with its links, pipes and times."""
    target.mkdir()
    for entry in os.scandir(source):
        path = target / entry.name
        if entry.is_symlink():
            path.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            copy(Path(entry.path), path)
        elif entry.is_file():
            shutil.copy2(entry.path, path)
        else:
            os.mkfifo(path)


def main() -> None:
    place = Path(sys.argv[1])
    warm_up(place)
    for line in sys.stdin:
        fields = json.loads(line)
        attempt = Attempt(**fields)
        result = examine(attempt, place)
        print(json.dumps(result), flush=True)
        if attempt.changes or result["changed"]:
            restore(place)


if __name__ == "__main__":
    main()
