"""A heap for the large tensors of training on a CPU; see `ops/tensor_heap.h`."""

from dataclasses import dataclass

import torch

from workhorse.native import build


@dataclass(frozen=True)
class Heap:
    """The process's heap; an instance exists only where it could be compiled."""

    def keep(self, keeps: bool) -> bool:
        """Begin or end making large tensors in it and keeping freed memory resident.

        Tensors that lie in it when that ends stay where they are.

        Args:
            keeps: True to begin, False to end.

        Returns:
            False if the heap cannot be used: the process's address space is limited, or the system
            is not Linux.
        """
        return torch.ops.workhorse_heap.keep.default(keeps)

    def give_back(self) -> None:
        """Return what is free now to the system, once."""
        torch.ops.workhorse_heap.give_back.default()


def load(*, wait: bool) -> Heap:
    """The heap, compiled first if it never was on this machine; see `resolve`.

    Raises:
        build.Unavailable: why it cannot be used, in one line.
    """
    build.load(build.ensure("heap", wait=wait))
    return Heap()
