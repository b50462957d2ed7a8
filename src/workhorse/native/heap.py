"""A heap of its own for the large tensors of training on a CPU; see `ops/tensor_heap.h`."""

from dataclasses import dataclass

import torch

from workhorse.native import build


@dataclass(frozen=True)
class Heap:
    """The heap, which belongs to the process; an instance exists only if it was compiled."""

    def keep(self, keeps: bool) -> bool:
        """Whether large tensors are made in it from now on, and freed memory stays.

        Tensors that lie in it when that ends stay where they are.

        Returns:
            False: a limit on the process's addresses forbids it, or the system is not Linux.
        """
        return torch.ops.workhorse_heap.keep.default(keeps)

    def give_back(self) -> None:
        """Return what is free now to the system, once."""
        torch.ops.workhorse_heap.give_back.default()


def load() -> Heap:
    """The heap, compiled first, for a few seconds, if it never was on this machine.

    Raises:
        build.Unavailable: why it cannot be used, in one line.
    """
    build.load(build.ensure("heap", wait=True))
    return Heap()
