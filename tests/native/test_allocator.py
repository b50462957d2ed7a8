"""Training resets its settings of the C library when it ends."""

import ctypes
import subprocess
import sys
from unittest import mock

import pytest
import torch

from workhorse.errors import WorkhorseError
from workhorse.native import allocator
from workhorse.native.allocator import keep_freed_memory

CPU = torch.device("cpu")
BYTES = 64 * 2**20


class MallInfo(ctypes.Structure):
    """The struct in glibc's malloc.h; `hblkhd` is the bytes of blocks allocated by mmap."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"fghij")]


def fetches() -> bool:
    """True if a large block is allocated by mmap, and returned to the system when freed."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("no glibc, or one older than 2.33")
    library.mallinfo2.restype = MallInfo
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    before = library.mallinfo2().hblkhd
    block = library.malloc(BYTES)
    assert block
    grown = library.mallinfo2().hblkhd - before
    library.free(block)
    return grown >= BYTES


def test_freed_memory_is_kept_while_training_and_no_longer() -> None:
    # In a separate process: glibc takes a large block from memory that earlier tests have freed.
    # After a failed malloc it continues in an arena that uses mmap for every block.
    code = "from tests.native import test_allocator; test_allocator.all_checks()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def all_checks() -> None:
    for check in (keeps_and_lets_go, is_refused, trains_elsewhere, fails):
        check()


def keeps_and_lets_go() -> None:
    assert fetches()
    with keep_freed_memory(CPU):
        assert not fetches()
        with keep_freed_memory(CPU):
            assert not fetches()
        assert not fetches()
    assert fetches()


def fails() -> None:
    with pytest.raises(RuntimeError, match="no memory"), keep_freed_memory(CPU):
        raise RuntimeError("no memory")
    assert fetches()


def is_refused() -> None:
    with mock.patch.object(allocator, "_heap", side_effect=WorkhorseError("no such level")):
        with pytest.raises(WorkhorseError), keep_freed_memory(CPU):
            pass
        assert fetches()


def trains_elsewhere() -> None:
    with keep_freed_memory(torch.device("meta")):
        assert fetches()
