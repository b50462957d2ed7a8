"""How the threads of native operators wait for each other; set before torch is imported."""

import ctypes
import os
import platform
import sys

SPINS = 10_000
"""Number of times that a thread checks for the others before it sleeps: for 0.2 ms or more.

GNU OpenMP's default is 300,000 times, which takes milliseconds. If other programs use the remaining
cores, the waiting thread then keeps a core from the threads that it waits for. If threads sleep too
soon, they are often woken together on one core, and stay there for tens of milliseconds although
another core is idle.
"""
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that take precedence over `SPINS`."""
SLICE = 100_000
"""Nanoseconds after which Linux may give a thread's core to another program.

If both have work, the thread gets the same share of the core as with longer slices. But it returns
to the core sooner, so the threads that wait for it wait less.
"""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call `sched_setattr`, by machine."""


def share_cores() -> None:
    """Let waiting threads sleep soon, so that other programs on the machine slow them down less.

    The command line calls this. A program must call it before it first imports torch. It configures
    GNU OpenMP, which PyTorch's builds for Linux include, and asks Linux for short time slices.

    Raises:
        RuntimeError: torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported; call share_cores before importing it")
    if not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    run_in_slices(SLICE)


class _Attributes(ctypes.Structure):
    """Argument of the system call: Linux's `struct sched_attr`."""

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
    """Ask Linux (6.12 or newer) for the time slices of this thread and the threads it starts.

    On other systems, and for a thread without the default scheduling policy, nothing changes.

    Args:
        nanoseconds: length of a slice; 0: the system's default.
    """
    call = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = ctypes.sizeof(_Attributes), os.getpriority(os.PRIO_PROCESS, 0)
    asked = _Attributes(size=size, policy=os.SCHED_OTHER, nice=nice, runtime=nanoseconds)
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(asked), 0)  # a failure changes nothing
