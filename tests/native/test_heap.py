"""The heap for large tensors: it keeps, merges and returns memory, and tensors may outlive it."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from workhorse.devices.memory import resident
from workhorse.native import resolve
from workhorse.native.allocator import keep_freed_memory
from workhorse.native.heap import Heap

HEAP = resolve("heap", wait=True).heap
MIB = 2**20
needs_heap = pytest.mark.skipif(HEAP is None, reason="no compiler, or native operators are off")


def block(mib: float) -> Tensor:
    return torch.ones(int(mib * MIB), dtype=torch.uint8)


def kept() -> Heap:
    assert HEAP is not None
    assert HEAP.keep(True)
    return HEAP


def freed_blocks_join() -> None:
    kept()
    first, second, third = block(8), block(16), block(8)
    low, high = first.data_ptr(), third.data_ptr()
    assert low < second.data_ptr() < high
    del second
    assert block(16).data_ptr() > low  # its space is as large as before
    again = block(16)
    assert low < again.data_ptr() < high
    del first, again
    assert block(24).data_ptr() == low
    small = block(1)
    assert small.data_ptr() == low  # the smallest gap that fits, and the only one
    del third, small
    whole = block(40)  # the free end grows
    assert whole.data_ptr() == low
    assert (whole == 1).all()
    assert whole.data_ptr() % 64 == 0


def freed_memory_stays_until_given_back() -> None:
    heap = kept()
    before = resident()
    block(256)  # and freed
    assert resident() - before > 250 * MIB
    heap.give_back()
    assert resident() - before < 32 * MIB  # memory that the process used for the first time
    weights = block(256)
    assert heap.keep(False)
    assert (weights == 1).all()  # not moved
    del weights
    assert resident() - before < 32 * MIB


def small_blocks_are_the_c_librarys() -> None:
    heap = kept()
    large, small = block(1), torch.ones(100)
    assert abs(large.data_ptr() - small.data_ptr()) > 2**30
    heap.keep(False)
    assert abs(large.data_ptr() - block(1).data_ptr()) > 2**20
    with keep_freed_memory(torch.device("cpu")):
        inner = block(1)
        assert abs(large.data_ptr() - inner.data_ptr()) < 2**24
        inner.resize_(2 * MIB).fill_(2)
        assert inner.sum() == 4 * MIB


def all_checks() -> None:
    for check in (
        freed_blocks_join,
        freed_memory_stays_until_given_back,
        small_blocks_are_the_c_librarys,
    ):
        check()
        kept().keep(False)


@needs_heap
def test_the_heap() -> None:
    """Run in a process that has no other tensors."""
    code = "from tests.native import test_heap; test_heap.all_checks()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_heap
def test_where_addresses_are_limited_the_c_library_stays() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36));"
        "from tests.native.test_heap import HEAP; assert not HEAP.keep(True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
