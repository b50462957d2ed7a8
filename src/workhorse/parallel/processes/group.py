"""Process groups, and a watchdog that ends a run whose ranks hang."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Change = Callable[[Tensor], Tensor]


class Group:
    """Some of a run's processes. Methods are collective: all of them call each, in the same order.

    Where one of them has gone, the others get a RuntimeError, which `join_processes` turns into a
    `LostError`.

    Args:
        rank: the number of this one among them, from 0.
        size: how many there are.
        process_group: takes what they send; None for PyTorch's default.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size, self.process_group = rank, size, process_group

    @property
    def is_first(self) -> bool:
        """Whether this is the process that acts where only one does."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether no other follows this one."""
        return self.rank == self.size - 1

    def gather(self, own: Tensor) -> Tensor:
        """All-gather: the (…) of every process, of one shape, as (size, …) in their order."""
        if self.size == 1:
            return own[None]
        gathered = own.new_empty(self.size, *own.shape)
        dist.all_gather(list(gathered), own.contiguous(), group=self.process_group)
        return gathered

    def exchange(
        self, rows: Tensor, sends: list[int] | None = None, receives: list[int] | None = None
    ) -> Tensor:
        """All-to-all: the rows that the processes send this one, in the order of their numbers.

        Args:
            rows: (rows, …), those for each process, one after the other.
            sends: how many for each; None: as many for all.
            receives: how many from each, likewise.
        """
        received = rows.new_empty(_total(receives, rows), *rows.shape[1:])
        group = self.process_group
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    def add_(self, tensor: Tensor) -> Tensor:
        """All-reduce: add up a tensor over the processes, in place, in the backend's order.

        Whole numbers, and numbers that all other processes have as 0, come out the same in any.
        """
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def add(self, tensor: Tensor) -> Tensor:
        """All-reduce into a new tensor, which takes no gradient."""
        return self.add_(tensor.detach().clone(memory_format=torch.contiguous_format))

    def largest(self, tensor: Tensor) -> Tensor:
        """All-reduce by maximum, number by number, into a new tensor."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(result, dist.ReduceOp.MAX, group=self.process_group)
        return result

    def most(self, number: int) -> int:
        """The largest of the whole numbers that the processes give."""
        return int(self.largest(torch.tensor(number)))

    def wait(self) -> None:
        """Wait at a barrier."""
        self.most(0)

    @contextmanager
    def first_before_others(self) -> Generator[None]:
        """Run the body on the first process, then on the others, which find its work done."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def send(self, x: Tensor, to: int) -> dist.Work | None:
        """Begin to send a tensor, which must stay as it is until that is done."""
        return dist.isend(x, group=self.process_group, group_dst=to)

    def receive(self, into: Tensor, sender: int) -> Tensor:
        """Wait for a tensor from another process; returns the one that it is written to."""
        dist.recv(into, group=self.process_group, group_src=sender)
        return into

    def broadcast_last_(self, x: Tensor) -> Tensor:
        """Broadcast: write what the last process has over a tensor of that shape; returns it."""
        dist.broadcast(x, group=self.process_group, group_src=self.size - 1)
        return x


class AbsentGroup(Group):
    """One whose other processes are not there, for passes on tensors without data."""

    def gather(self, own: Tensor) -> Tensor:
        return own.new_empty(self.size, *own.shape)

    def exchange(
        self, rows: Tensor, sends: list[int] | None = None, receives: list[int] | None = None
    ) -> Tensor:
        del sends
        return rows.new_empty(_total(receives, rows), *rows.shape[1:])

    def add_(self, tensor: Tensor) -> Tensor:
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def send(self, x: Tensor, to: int) -> None:
        del x, to

    def receive(self, into: Tensor, sender: int) -> Tensor:
        del sender
        return into

    def broadcast_last_(self, x: Tensor) -> Tensor:
        return x


def _total(receives: list[int] | None, rows: Tensor) -> int:
    return len(rows) if receives is None else sum(receives)


def summed(parts: Tensor) -> Tensor:
    """The sum along the first axis, in float32 at least, rounded once to the dtype of the parts."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    return parts.sum(dim=0, dtype=wide).to(parts.dtype)


def with_gradient(change: Change, back: Change, x: Tensor) -> Tensor:
    """Apply `change` in the forward pass, and `back` to the gradient in the backward pass."""
    return cast(Tensor, _WithGradient.apply(x, change, back))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change, back: Change) -> Tensor:
        ctx.back = back
        return change(x)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(above[0]), None, None


HANGS = 1
"""The exit code of a process that was ended."""


@contextmanager
def watched(group: Group, patience: float) -> Generator[Callable[[], None]]:
    """Give a function that is to be called after every step.

    If it is not called for so long, this process prints where each of its threads is, and ends at
    once: it or another hangs. A process alone is not watched.

    Args:
        group: all of the run.
        patience: in seconds.
    """
    if group.size == 1:
        yield lambda: None
        return
    progress, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while progress.wait(patience):
            progress.clear()
            if ended.is_set():
                return
        own = threading.get_ident()
        print(_report(group, patience, own), file=sys.stderr, flush=True)
        os._exit(HANGS)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield progress.set
    finally:
        ended.set()
        progress.set()
        thread.join()


def _report(group: Group, patience: float, own: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return "\n".join(
        [
            f"workhorse: process {group.rank} of {group.size} has made no step for {patience:g} s: "
            "it hangs, or waits for another that does. It is at",
            *stacks,
        ]
    )
