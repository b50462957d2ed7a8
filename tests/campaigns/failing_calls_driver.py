"""Makes each file-system call of an operation fail, and kills the process before and after each.

    LD_PRELOAD=failing_calls.so python -m tests.campaigns.failing_calls_driver OPERATION FOLDER

Each case runs in a fork of this process, on a fresh copy of the operation's initial folder.
Prints the cases and the failures as JSON. `failing_calls_operations.py` has the checks.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.failing_calls_operations import OPERATIONS, Operation
from workhorse.cli.main import mistake
from workhorse.cli.output import ExitCode
from workhorse.files.writing import TEMPORARY

FAIL, FAIL_ON, KILL_BEFORE, KILL_AFTER, SHORT = 1, 2, 3, 4, 5
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EBUSY, errno.EINTR)
ACTIONS = {
    **{f"{errno.errorcode[number]} once": (FAIL, number) for number in NUMBERS},
    **{f"{errno.errorcode[number]} from then on": (FAIL_ON, number) for number in NUMBERS[:3]},
    "killed before": (KILL_BEFORE, 0),
    "killed after": (KILL_AFTER, 0),
    "half of the bytes": (SHORT, 0),
}
SECONDS = 30
KILLED = 137

library = ctypes.CDLL(None)
library.where.restype = ctypes.c_char_p


def in_fork(act: Callable[[], int], said: Path) -> int:
    """Run a function in a fork and return its exit status; its output is written to a file."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(SECONDS)
    status = ExitCode.FAILURE
    try:
        out = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            status = act()
        except Exception as error:
            library.disarm()
            print(mistake(error) or traceback.format_exc())
            status = ExitCode.USAGE
        library.disarm()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def one_case(operation: Operation, home: Path, call: int, action: str) -> str | None:
    """Run one case and return a description of the failure, or None."""
    base, said = home / "base", home / "said"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(home / "begin", base)
    shutil.copystat(home / "begin", base)

    def act() -> int:
        library.arm(os.fsencode(base), call, *ACTIONS[action])
        return operation.act(base)

    status = in_fork(act, said)
    text = said.read_text()
    try:
        assert status in (0, 1, 2, KILLED), "it hung" if status == -signal.SIGALRM else status
        assert "Traceback" not in text, text
        assert len([line for line in text.splitlines() if "Error" in line]) <= 1, text
        operation.check(base, status == 0)
        for path in base.rglob(f"{TEMPORARY}*"):  # simulate that time has passed
            os.utime(path, (0, 0))
        status = in_fork(lambda: operation.again(base), said)
        assert status == 0, f"again: {said.read_text()}"
        operation.check(base, True)
        left = [path.name for path in base.rglob(".*") if path.name.startswith((TEMPORARY, ".tmp"))]
        assert not left, f"{left} stay"
    except Exception as error:
        with contextlib.suppress(ValueError):
            text = text.strip().splitlines()[-1] if text.strip() else ""
        return f"{action} of call {call}, {library.where().decode()}: {error!r}; it said: {text}"
    return None


def main(name: str, folder: str, only: str = "") -> None:
    home = Path(folder)
    operation = OPERATIONS[name]
    (home / "begin").mkdir()
    operation.begin(home / "begin")
    cases, failures, call = 0, [], 0
    shutil.copytree(home / "begin", home / "warm")
    with contextlib.redirect_stdout(sys.stderr):
        assert operation.act(home / "warm") == 0  # imports everything before the first fork
    assert (failure := one_case(operation, home, 0, "EIO once")) is None, failure
    while call == 0 or library.calls() >= call:
        call += 1
        for action in ACTIONS:
            if only in action:
                failure = one_case(operation, home, call, action)
                if library.calls() < call and "killed" not in action:
                    break
                cases += 1
                if failure is not None:
                    failures.append(failure)
    print(json.dumps({"calls": call - 1, "cases": cases, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
