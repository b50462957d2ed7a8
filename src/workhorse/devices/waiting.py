"""Settings for how threads wait for each other; they must be set before torch is imported."""

import ctypes
import os
import platform
import sys

SPINS = 10_000
"""Number of times that a waiting thread checks whether it can continue before it sleeps.

10,000 checks take 0.2 ms or more. GNU OpenMP's default, 300,000, takes milliseconds. During this
time, a waiting thread occupies a core that the threads it waits for may need. If threads sleep too
soon, they are often woken together on one core, and stay there for tens of milliseconds although
another core is idle.
"""
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables of GNU OpenMP. If the user has set one, `SPINS` is not used."""
SLICE = 100_000
"""Nanoseconds after which Linux may give a thread's core to another program.

Slices shorter than the default do not change the thread's share of the core, but it runs again
sooner. So the threads that wait for it wait less.
"""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call `sched_setattr`, by machine."""


def share_cores() -> None:
    """Configure threads so that other programs on the machine slow them down less.

    Waiting threads of GNU OpenMP, which PyTorch uses on Linux, sleep sooner, and Linux gives short
    time slices. The command line calls this. Programs must call it before they import torch.

    Raises:
        RuntimeError: torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported; call share_cores before importing it")
    if not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    run_in_slices(SLICE)


class _Attributes(ctypes.Structure):
    """Linux's `struct sched_attr`, the argument of the system call `sched_setattr`."""

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
    """Set the length of the time slices of this thread and of the threads that it starts later.

    It needs Linux 6.12 or newer and the default scheduling policy; otherwise nothing changes.

    Args:
        nanoseconds: length of a slice; 0: the system's default.
    """
    call = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    size, nice = ctypes.sizeof(_Attributes), os.getpriority(os.PRIO_PROCESS, 0)
    asked = _Attributes(size=size, policy=os.SCHED_OTHER, nice=nice, runtime=nanoseconds)
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(asked), 0)  # a failure changes nothing
