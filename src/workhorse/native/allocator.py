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
"""Options that restore glibc's usual behaviour. By default, glibc adapts two thresholds to the
largest freed block; the first call of `mallopt` stops this. These are the values after 32 MiB."""

CPU = torch.device("cpu")
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def keep_freed_memory(device: torch.device = CPU) -> Iterator[None]:
    """Context manager that keeps freed CPU memory for the next step or batch.

    For other devices it does nothing. It affects the whole process, so libraries should not use it.
    The command line uses it for training and evaluation.

    By default, glibc returns every large block to the system. The system then clears its pages when
    they are allocated again: 22 % of a step of GPT-2 in bfloat16 on two cores. This function makes
    glibc keep freed memory. If there is a compiler, large tensors also get a separate heap, because
    glibc's heap scatters them and takes up to a quarter more memory. When the last context exits,
    both heaps are reset and their memory is returned.

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

    This is useful after a model is built. Building leaves free memory between its tensors, in gaps
    that are too small for a step: 170 MiB for GPT-2 in bfloat16. If the C library is not glibc,
    only the memory of the heap for large tensors is returned.
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
