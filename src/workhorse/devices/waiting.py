"""How the threads of an operator wait for each other, which is settled when torch is imported."""

import ctypes
import os
import platform
import sys

SPINS = 10_000
"""How often a thread looks whether the others have come before it sleeps: for 0.2 ms or more.

By itself GNU OpenMP looks 300,000 times, for milliseconds, in which the thread keeps a core from
those that it waits for where other work has the rest. Threads that soon sleep are often woken on
one core together, where they stay for tens of milliseconds though another is idle.
"""
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Of the environment; what they say goes first."""
SLICE = 100_000
"""Nanoseconds after which Linux may give a thread's core to another program.

Where both have work the thread gets as much of the core as with longer slices, but is let back in
sooner, and the threads that wait for it wait less.
"""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call, by machine."""


def share_cores() -> None:
    """Let threads that wait sleep soon, so that other work on the machine disturbs them less.

    The command line does this by itself. A program calls it before it first imports torch. It tells
    GNU OpenMP, which PyTorch's builds for Linux bring along, and asks Linux for short slices.

    Raises:
        RuntimeError: torch is imported already, too late.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; call share_cores before")
    if not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    run_in_slices(SLICE)


class _Attributes(ctypes.Structure):
    """What the call takes: Linux's `struct sched_attr`."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def run_in_slices(nanoseconds: int) -> None:
    """Ask Linux, which takes it from 6.12 on, to run this thread and those it starts in slices.

    Elsewhere, and for a thread that has another policy than the usual one, nothing changes.

    Args:
        nanoseconds: of a slice; 0: as long as the system's own.
    """
    call = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = ctypes.sizeof(_Attributes), os.getpriority(os.PRIO_PROCESS, 0)
    asked = _Attributes(size=size, policy=os.SCHED_OTHER, nice=nice, runtime=nanoseconds)
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(asked), 0)  # what is refused stays as it was
