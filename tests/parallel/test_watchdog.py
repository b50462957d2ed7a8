"""Processes that hang print their stack traces and exit."""

import subprocess
import sys
import threading

import pytest

from workhorse.parallel.processes.group import HANGS, Group, watchdog

HANGING = """
import time
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.group import watchdog

def wait_for_nobody():
    time.sleep(600)

with watchdog(Group(1, 3), 1) as progress:
    for _ in range(5):
        time.sleep(0.25)
        progress()
    print("five steps", flush=True)
    wait_for_nobody()
"""


def test_a_process_that_hangs_says_where_and_ends() -> None:
    command = [sys.executable, "-c", HANGING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "five steps\n"
    assert done.returncode == HANGS
    first, *stacks = done.stderr.splitlines()
    assert first.startswith("workhorse: process 1 of 3 has completed no step for 1 s: it hangs, ")
    assert stacks[0] == "MainThread:"
    assert any("in wait_for_nobody" in line for line in stacks)


@pytest.mark.parametrize("group", [Group(), Group(0, 2)])
def test_after_the_last_step_nothing_is_watched(group: Group) -> None:
    with watchdog(group, 60) as progress:
        assert watching() == (group.size > 1)
        progress()
    assert not watching()


def watching() -> bool:
    """True if a watchdog thread is running."""
    return any(thread.name == "watchdog" for thread in threading.enumerate())
