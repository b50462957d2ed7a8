"""Process groups, and a watchdog that ends a run whose ranks hang."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

Change = Callable[[Tensor], Tensor]


class Group:
    """A process group. Methods are collective: all ranks must call them in the same order.

    If a process exits, the others get a RuntimeError, which `join_processes` turns into a
    `LostError`.

    Args:
        rank: the rank of this process in the group.
        size: number of processes.
        process_group: PyTorch's process group; None for the default group.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size, self.process_group = rank, size, process_group

    @property
    def is_first(self) -> bool:
        """True for rank 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True for the last rank."""
        return self.rank == self.size - 1

    def gather(self, own: Tensor) -> Tensor:
        """All-gather: stack the tensors of all ranks, which have equal shapes (…), as (size, …)."""
        if self.size == 1:
            return own[None]
        gathered = own.new_empty(self.size, *own.shape)
        dist.all_gather(list(gathered), own.contiguous(), group=self.process_group)
        return gathered

    def exchange(
        self, rows: Tensor, sends: list[int] | None = None, receives: list[int] | None = None
    ) -> Tensor:
        """All-to-all: the rows that this rank receives, in the order of the sending ranks.

        Args:
            rows: (rows, …), the rows for each rank, concatenated.
            sends: number of rows for each rank; None: the same number for all.
            receives: number of rows from each rank; None: the same number from all.
        """
        received = rows.new_empty(_total(receives, rows), *rows.shape[1:])
        group = self.process_group
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    def add_(self, tensor: Tensor) -> Tensor:
        """All-reduce: sum a tensor over the ranks, in place, in the backend's order.

        The order can change the rounding of floating-point sums, but not integers, nor elements
        that are non-zero on at most one rank.
        """
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def add(self, tensor: Tensor) -> Tensor:
        """All-reduce into a new tensor without a gradient."""
        return self.add_(tensor.detach().clone(memory_format=torch.contiguous_format))

    def largest(self, tensor: Tensor) -> Tensor:
        """All-reduce by elementwise maximum into a new tensor."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(result, dist.ReduceOp.MAX, group=self.process_group)
        return result

    def most(self, number: int) -> int:
        """All-reduce an integer by maximum."""
        return int(self.largest(torch.tensor(number)))

    def wait(self) -> None:
        """Wait at a barrier."""
        self.most(0)

    @contextmanager
    def first_before_others(self) -> Generator[None]:
        """Run the body on rank 0, then on the others, so that they can use its results."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def send(self, x: Tensor, to: int) -> dist.Work | None:
        """Send a tensor asynchronously; do not change it before the returned work is done."""
        return dist.isend(x, group=self.process_group, group_dst=to)

    def receive(self, into: Tensor, sender: int) -> Tensor:
        """Receive a tensor from another rank into `into`, and return `into`."""
        dist.recv(into, group=self.process_group, group_src=sender)
        return into

    def broadcast_last_(self, x: Tensor) -> Tensor:
        """Broadcast: overwrite x with the last rank's x, and return it."""
        dist.broadcast(x, group=self.process_group, group_src=self.size - 1)
        return x


class Call(NamedTuple):
    """A collective that a rank has called."""

    kind: str
    """`all_gather`, `all_to_all`, `all_reduce`, `reduce_scatter`, `broadcast`, `send` or
    `receive`."""
    n_bytes: int
    """Bytes of the rank's input; for `receive` of the received tensor."""


class AbsentGroup(Group):
    """A group without other processes, to trace passes on tensors without data.

    Methods return tensors of the right shape and do not communicate.

    Attributes:
        calls: the collectives that were called.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)
        self.calls: list[Call] = []

    def _note(self, kind: str, tensor: Tensor) -> None:
        self.calls.append(Call(kind, tensor.numel() * tensor.element_size()))

    def gather(self, own: Tensor) -> Tensor:
        self._note("all_gather", own)
        return own.new_empty(self.size, *own.shape)

    def exchange(
        self, rows: Tensor, sends: list[int] | None = None, receives: list[int] | None = None
    ) -> Tensor:
        del sends
        self._note("all_to_all", rows)
        return rows.new_empty(_total(receives, rows), *rows.shape[1:])

    def add_(self, tensor: Tensor) -> Tensor:
        self._note("all_reduce", tensor)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        self._note("all_reduce", tensor)
        return torch.empty_like(tensor)

    def send(self, x: Tensor, to: int) -> None:
        del to
        self._note("send", x)

    def receive(self, into: Tensor, sender: int) -> Tensor:
        del sender
        self._note("receive", into)
        return into

    def broadcast_last_(self, x: Tensor) -> Tensor:
        self._note("broadcast", x)
        return x


def _total(receives: list[int] | None, rows: Tensor) -> int:
    return len(rows) if receives is None else sum(receives)


def summed(parts: Tensor) -> Tensor:
    """Sum along the first axis in at least float32, rounded once to the dtype of the parts."""
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
"""The exit code of a process that the watchdog ends."""


@contextmanager
def watchdog(group: Group, patience: float) -> Generator[Callable[[], None]]:
    """Start a watchdog, and yield a function that the caller must call after every step.

    If the function is not called for `patience` seconds, this process or another hangs. The
    watchdog then prints the stack traces of all threads and ends the process immediately. A group
    of one process has no watchdog.

    Args:
        group: all processes of the run.
        patience: maximum seconds between calls.
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
            f"workhorse: process {group.rank} of {group.size} has completed no step for "
            f"{patience:g} s: it hangs, or waits for another process that hangs. Stack traces:",
            *stacks,
        ]
    )
