"""A watchdog over processes that wait for each other: one that hangs would have all wait."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

from workhorse.parallel.processes.group import Group

HANGS = 1
"""The exit code of a process that was ended."""


@contextmanager
def watched(group: Group, patience: float) -> Generator[Callable[[], None]]:
    """Give a function that is to be called after every step.

    If it is not called for so long, this process prints where each of its threads is, and ends at
    once: it or another hangs. A process alone is not watched.

    Args:
        group: all of the run.
        patience: in seconds.
    """
    if group.size == 1:
        yield lambda: None
        return
    progress, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while progress.wait(patience):
            progress.clear()
            if ended.is_set():
                return
        own = threading.get_ident()
        print(_report(group, patience, own), file=sys.stderr, flush=True)
        os._exit(HANGS)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield progress.set
    finally:
        ended.set()
        progress.set()
        thread.join()


def _report(group: Group, patience: float, own: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return "\n".join(
        [
            f"workhorse: process {group.rank} of {group.size} has made no step for {patience:g} s: "
            "it hangs, or waits for another that does. It is at",
            *stacks,
        ]
    )
