"""Checkpoints written while training goes on."""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from workhorse.checkpoints import Checkpoint
from workhorse.checkpoints.runs.store import Tensors
from workhorse.devices.memory import free_memory
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import Slice, Slices, whole
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.world import World

COPIES = 2
"""A checkpoint's tensors are copied only if so many times their size is free."""


class Store(Protocol):
    """Where checkpoints are written and read.

    `begin` is called by the first process, `fill` by each, `commit` by the first. These three raise
    WorkhorseError where the disk refuses.

    Attributes:
        remarks: warnings for the user about what was saved; the caller takes them out.
    """

    remarks: list[str]

    def begin(self, step: int, tensors: Tensors) -> None:
        """Make the files, without their bytes, under a temporary name."""
        ...

    def fill(self, step: int, tensors: Tensors) -> None:
        """Write this process's slices to their places."""
        ...

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state, give the checkpoint its name, and prune; returns its folder."""
        ...

    def give_up(self) -> None:
        """Remove what was begun; raises nothing."""
        ...

    def newest(self, on_skip: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint or None; `on_skip` gets a line for each newer damaged one."""
        ...

    def prune(self, step: int) -> None:
        """Of the checkpoints up to `step`, remove the oldest beyond those to keep."""
        ...


class Saver:
    """Writes one checkpoint at a time, by a thread, from copies of the tensors.

    Without memory for the copies it writes before training goes on. Of divided tensors each process
    writes its rows, and the first begins and ends the checkpoint.

    Args:
        store: of the run.
        saved: called with the step and the folder of each, by the caller's thread.
        world: the processes that save, which must do so together.
        own: what this process has to write of the tensors.

    Attributes:
        failed: whether a checkpoint could not be written.
    """

    def __init__(
        self,
        store: Store,
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
        """Write what the tensors hold now, after the checkpoint before.

        Args:
            step: training steps done.
            tensors: give those of each file, by name.
            state: data that JSON can express; the first process's is written.

        Raises:
            WorkhorseError: that one could not be written, or this one is written at once and cannot
                be.
        """
        self.wait()
        own = {file: dict(self.own(read())) for file, read in tensors.items()}
        room = self._has_room_for_copies(own)
        kept = {file: _copies(slices) for file, slices in own.items()} if room else own
        self._writing = step, self._thread.submit(self._write, step, kept, state)
        if not room:
            self.wait()

    def look(self) -> None:
        """Tell of a checkpoint that has been written meanwhile, without waiting.

        Raises:
            WorkhorseError: it could not be, and no other process waits for this one.
        """
        if self._writing is not None and self._writing[1].done():
            if self.world.in_step and self._writing[1].exception():
                return  # `wait` raises it in all of them
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            WorkhorseError: it could not be written.
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
        sharers = environment.count_here() if self.world.in_step else 1
        free = free_memory()
        return free is not None and COPIES * size * sharers <= free

    def _write(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path | None:
        """Returns the checkpoint, where this is the process that gave it its name."""
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
        """What stands inside must succeed in all processes before any goes on.

        Raises:
            WorkhorseError: it failed here, or in another.
        """
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
                "another process could not write its part of a checkpoint; its own message says why"
            )


def _copies(slices: dict[str, Slice]) -> Slices:
    """A copy of each in turn, which is then let go: some, read from bfloat16, exist for this."""
    copies: dict[str, Slice] = {}
    for name in list(slices):
        one = slices.pop(name)
        copies[name] = one._replace(values=one.values.to("cpu", copy=True))
    return copies
