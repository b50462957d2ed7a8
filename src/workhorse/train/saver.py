"""Checkpoints written while training goes on."""

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from workhorse.checkpoints import Checkpoint
from workhorse.memory import free_memory

COPIES = 2
"""A checkpoint's tensors are copied only if so many times their size is free."""


class Store(Protocol):
    """Where checkpoints are written and read."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path: ...

    def newest(self, on_skip: Callable[[str], None]) -> Checkpoint | None: ...

    def prune(self, step: int) -> None: ...


class Saver:
    """Writes one checkpoint at a time, by a thread, from copies of the tensors.

    Without memory for the copies it writes before training goes on.

    Args:
        store: writes it.
        saved: called with the step and the folder of each, by the caller's thread.

    Attributes:
        failed: whether a checkpoint could not be written.
    """

    def __init__(self, store: Store, saved: Callable[[int, Path], None]) -> None:
        self.store = store
        self.saved = saved
        self.failed = False
        self._thread = ThreadPoolExecutor(1, "saver")
        self._writing: tuple[int, Future[Path]] | None = None

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> None:
        """Write what the tensors hold now, after the checkpoint before.

        Raises:
            WorkhorseError: that one could not be written, or this one is written at once and cannot
                be.
        """
        self.wait()
        size = sum(tensor.nbytes for tensor in (*model.values(), *optimizer.values()))
        free = free_memory()
        if free is None or COPIES * size > free:
            with self._noting_failure():
                path = self.store.save(step, model, optimizer, state)
            self.saved(step, path)
            return
        written = self._thread.submit(
            self.store.save, step, _copies(model), _copies(optimizer), state
        )
        self._writing = step, written

    def look(self) -> None:
        """Tell of a checkpoint that has been written meanwhile, without waiting.

        Raises:
            WorkhorseError: it could not be.
        """
        if self._writing is not None and self._writing[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            WorkhorseError: it could not be written.
        """
        if self._writing is not None:
            (step, written), self._writing = self._writing, None
            with self._noting_failure():
                path = written.result()
            self.saved(step, path)

    @contextmanager
    def _noting_failure(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.failed = True
            raise


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
