"""How threads wait is set before torch is imported, unless the environment sets it."""

import os
import platform
import subprocess
import sys

import pytest

from workhorse.devices import waiting

SHOW = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


def shown(program: str, **settings: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in waiting.SETTINGS
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


CALL = f"from workhorse.devices.waiting import share_cores; share_cores(); {SHOW}"
COMMAND = f"""
import sys
from workhorse.cli.main import run
sys.argv = ["workhorse", "--version"]
try:
    run()
except SystemExit:
    {SHOW}
"""


@pytest.mark.parametrize("program", [CALL, COMMAND], ids=["a program", "the command line"])
def test_threads_sleep_soon_unless_told_otherwise(program: str) -> None:
    assert shown(program) == f"{waiting.SPINS} False"
    assert shown(program, GOMP_SPINCOUNT="7") == "7 False"
    assert shown(program, OMP_WAIT_POLICY="ACTIVE") == "None False"


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in waiting.SCHED_SETATTR,
    reason="the call is Linux's, and known for some machines",
)
def test_threads_and_programs_that_are_started_run_in_short_slices() -> None:
    slice_of = """
import ctypes, threading
from workhorse.devices.waiting import _Attributes, run_in_slices
def slice_now():
    found = _Attributes()
    ctypes.CDLL(None).syscall(GET, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return found.runtime
usual, seen = slice_now(), []
run_in_slices(200_000)
thread = threading.Thread(target=lambda: seen.append(slice_now()))
thread.start(); thread.join()
run_in_slices(0)
print(usual > 0, seen[0], slice_now() == usual)
"""
    get = str(waiting.SCHED_SETATTR[platform.machine()] + 1)
    known, within, after = shown(slice_of.replace("GET", get)).split()
    if known == "False":
        pytest.skip("this Linux supports no custom slices")
    assert (int(within), after) == (200_000, "True")


def test_it_is_too_late_once_torch_is_there() -> None:
    with pytest.raises(RuntimeError, match="call share_cores before importing it"):
        waiting.share_cores()  # the tests have imported it
