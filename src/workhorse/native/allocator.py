"""Memory allocation on a CPU while a model is trained or evaluated."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from workhorse.native import resolve
from workhorse.native.heap import Heap

# Options of `mallopt`, numbered as in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEEP = {
    _MMAP_MAX: 0,
    _TRIM_THRESHOLD: 2**31 - 1,
    _TOP_PAD: 2**26,  # bytes that the heap grows by at least
}
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}
"""glibc's defaults, with the thresholds that it reaches once a block of 32 MiB was freed: after the
first `mallopt` they no longer rise by themselves."""

CPU = torch.device("cpu")
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def keep_freed_memory(device: torch.device = CPU) -> Iterator[None]:
    """On a CPU, keep freed memory for the next step or batch; elsewhere do nothing.

    This concerns the whole process, so the library leaves it to programs; the command line does it
    where it trains or evaluates.

    By default glibc returns every large block to the system and allocates it again, and the system
    clears each of its pages: 22 % of a step of GPT-2 in bfloat16 on two cores. Where there is a
    compiler, large tensors go to a heap of their own: glibc's, told to keep what is freed, scatters
    them and takes up to a quarter more. Both heaps belong to the process, so the last context to
    exit resets them and returns the memory.

    Args:
        device: where the model is.
    """
    global _users  # noqa: PLW0603 - as the options are
    if device.type != "cpu":
        yield
        return
    with _lock:
        if _users == 0:
            _keep_tensors(True)  # first: it may refuse
            _set(_KEEP)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _set(_USUAL)
                _keep_tensors(False)
                give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return the memory freed so far to the system; without glibc, that of large tensors alone.

    The gaps that building a model leaves between its tensors are too scattered for a step to use:
    170 MiB for GPT-2 in bfloat16.
    """
    _call("malloc_trim", 0)
    if (heap := _heap()) is not None:
        heap.give_back()


def _keep_tensors(keeps: bool) -> None:
    if (heap := _heap()) is not None:
        heap.keep(keeps)


@cache
def _heap() -> Heap | None:
    return resolve("heap", wait=True).heap


def _set(options: dict[int, int]) -> None:
    for option, value in options.items():
        _call("mallopt", option, value)


def _call(function: str, *arguments: int) -> Any:
    """Call a function of glibc, if that is the C library."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another one, or Windows
        return getattr(ctypes.CDLL(None), function)(*arguments)
