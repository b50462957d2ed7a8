"""What training sets in the C library is reset when it ends."""

import ctypes
import subprocess
import sys

import pytest
import torch

from workhorse.train.step.allocator import keep_freed_memory

CPU = torch.device("cpu")
BYTES = 64 * 2**20


class MallInfo(ctypes.Structure):
    """Of glibc's malloc.h; `hblkhd` counts the bytes of blocks that were fetched one by one."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"fghij")]


def fetches() -> bool:
    """Whether a large block is fetched from the system by itself, and goes back when freed."""
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
    # In a process of its own: where a malloc has failed, as in tests of what no memory has room
    # for, glibc goes on in an arena that fetches every large block whatever is set.
    code = "from tests.train.test_allocator import keeps_and_lets_go; keeps_and_lets_go()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def keeps_and_lets_go() -> None:
    assert fetches()
    with keep_freed_memory(CPU):
        assert not fetches()
        with keep_freed_memory(CPU):
            assert not fetches()
        assert not fetches()
    assert fetches()


def test_a_training_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="no memory"), keep_freed_memory(CPU):
        raise RuntimeError("no memory")
    assert fetches()


def test_other_devices_leave_the_c_library_alone() -> None:
    with keep_freed_memory(torch.device("meta")):
        assert fetches()
