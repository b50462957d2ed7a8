"""Save checkpoints in the background, while training continues."""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from workhorse.checkpoints.runs.store import CheckpointStore, Tensors
from workhorse.devices.memory import free_memory
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import Slice, Slices, whole
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World

COPIES = 2
"""Tensors are copied only if the free memory is at least this multiple of their size."""


class Saver:
    """Writes one checkpoint at a time, in a thread, from copies of the tensors.

    If there is not enough memory for the copies, training waits until the checkpoint is written.
    Each rank writes its slices of sharded tensors; rank 0 creates and completes the checkpoint.

    Args:
        store: the checkpoint store of the run.
        saved: called in the caller's thread with step and folder of each written checkpoint.
        world: the processes that save together.
        own: selects the slices of the tensors that this rank writes.

    Attributes:
        failed: True if a checkpoint could not be written.
    """

    def __init__(
        self,
        store: CheckpointStore,
        saved: Callable[[int, Path], None],
        world: World,
        own: Callable[[Mapping[str, Tensor]], Slices] = whole,
    ) -> None:
        self.store = store
        self.own = own
        self.saved = saved
        self.world = world.apart()
        self.failed = False
        self._thread = ThreadPoolExecutor(1, "saver")
        self._writing: tuple[int, Future[Path | None]] | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Callable[[], Mapping[str, Tensor]]],
        state: Mapping[str, Any],
    ) -> None:
        """Start to save the current values of the tensors, once the previous save has finished.

        Args:
            step: training steps done.
            tensors: for each file name, a function that returns its tensors by name.
            state: JSON-serializable data; only rank 0 writes it.

        Raises:
            WorkhorseError: the previous checkpoint could not be written, or this one, if there is
                no memory for copies.
        """
        self.wait()
        own = {file: dict(self.own(read())) for file, read in tensors.items()}
        room = self._has_room_for_copies(own)
        kept = {file: _copies(slices) for file, slices in own.items()} if room else own
        self._writing = step, self._thread.submit(self._write, step, kept, state)
        if not room:
            self.wait()

    def look(self) -> None:
        """Call `saved` if the checkpoint in progress is complete by now; do not wait for it.

        Raises:
            WorkhorseError: the checkpoint could not be written. If ranks save together, only `wait`
                raises this error, so that all ranks raise it at the same time.
        """
        if self._writing is not None and self._writing[1].done():
            if self.world.lockstep and self._writing[1].exception():
                return  # `wait` raises the error on all ranks
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written.

        Raises:
            WorkhorseError: the checkpoint could not be written.
        """
        if self._writing is None:
            return
        (step, written), self._writing = self._writing, None
        try:
            path = written.result()
        except BaseException:
            self.failed = True
            raise
        if path is not None:
            self.saved(step, path)

    def _has_room_for_copies(self, tensors: Tensors) -> bool:
        size = sum(one.values.nbytes for slices in tensors.values() for one in slices.values())
        sharers = environment.count_here() if self.world.lockstep else 1
        free = free_memory()
        return free is not None and COPIES * size * sharers <= free

    def _write(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path | None:
        """Write the checkpoint; return its folder on rank 0, None on the others."""
        first = self.world.is_first
        try:
            with self._by_all():
                if first:
                    self.store.begin(step, tensors)
            with self._by_all():
                self.store.fill(step, tensors)
            with self._by_all():
                return self.store.commit(step, state) if first else None
        except WorkhorseError:
            if first:
                self.store.give_up()
            raise

    @contextmanager
    def _by_all(self) -> Generator[None]:
        """Context manager that raises an error on every rank if its body fails on any rank."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.world.most(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise WorkhorseError(
                "another process could not write its part of a checkpoint; see its error message"
            )


def _copies(slices: dict[str, Slice]) -> Slices:
    """Copy the slices to the CPU, and release each original before the next copy.

    Originals that were converted from bfloat16 exist only for the checkpoint, so this saves memory.
    """
    copies: dict[str, Slice] = {}
    for name in list(slices):
        one = slices.pop(name)
        copies[name] = one._replace(values=one.values.to("cpu", copy=True))
    return copies
