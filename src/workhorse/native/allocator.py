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
    _TOP_PAD: 2**26,  # minimum growth of the heap in bytes
}
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}
"""Options that restore glibc's usual behaviour: its defaults, with the thresholds that it reaches
after a block of 32 MiB was freed. The thresholds no longer adapt after the first `mallopt`."""

CPU = torch.device("cpu")
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def keep_freed_memory(device: torch.device = CPU) -> Iterator[None]:
    """Context manager that keeps freed CPU memory for the next step or batch.

    For other devices it does nothing. It changes the whole process, so only programs should use it,
    not libraries. The command line uses it for training and evaluation.

    By default glibc returns every large block to the system and allocates it again, and the system
    clears each of its pages: 22 % of a step of GPT-2 in bfloat16 on two cores. If there is a
    compiler, large tensors get a separate heap. glibc's own heap, set to keep freed memory,
    scatters large tensors and takes up to a quarter more. Both heaps belong to the process, so the
    last context to exit resets them and returns the memory.

    Args:
        device: the device of the model.
    """
    global _users  # noqa: PLW0603 - the options are global too
    if device.type != "cpu":
        yield
        return
    with _lock:
        if _users == 0:
            _keep_tensors(True)  # first, because it can raise
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
    """Return freed memory to the operating system.

    If the C library is not glibc, only the memory of large tensors is returned. Building a model
    leaves gaps between its tensors that are too scattered for a step to use: 170 MiB for GPT-2 in
    bfloat16.
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
    """Call a function of glibc; do nothing if the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another library, or Windows
        return getattr(ctypes.CDLL(None), function)(*arguments)
