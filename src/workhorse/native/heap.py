"""A heap for the large tensors of training on a CPU; see `ops/tensor_heap.h`."""

from dataclasses import dataclass

import torch

from workhorse.native import build


@dataclass(frozen=True)
class Heap:
    """The process's heap for large tensors; an instance exists only if its library is loaded."""

    def keep(self, keeps: bool) -> bool:
        """Start or stop allocating large tensors in this heap, which keeps freed memory resident.

        Tensors that are already in the heap remain there after a stop.

        Args:
            keeps: True to start, False to stop.

        Returns:
            False if the heap cannot be used, because the process's address space is limited or the
            system is not Linux.
        """
        return torch.ops.workhorse_heap.keep.default(keeps)

    def give_back(self) -> None:
        """Return the memory that is currently free in the heap to the operating system."""
        torch.ops.workhorse_heap.give_back.default()


def load(*, wait: bool) -> Heap:
    """Load the heap. It is compiled first if it is not in the user's cache; see `decoding.load`.

    Raises:
        build.Unavailable: the heap cannot be used; the message is the reason in one line.
    """
    build.provide("heap", {}, wait=wait)
    return Heap()
