"""Native operators that this machine can run, resolved once when a model or step is built."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

from workhorse.native import decoding, heap, matrix_unit, steps, training, vectors
from workhorse.native.build import Unavailable
from workhorse.native.decoding import Decoding
from workhorse.native.heap import Heap
from workhorse.native.matrix_unit import MatrixUnit
from workhorse.native.steps import Steps
from workhorse.native.training import Training
from workhorse.native.vectors import Vectors

Library = Literal["decoding", "heap", "matrix_unit", "steps", "training", "vectors"]
Loaded = tuple[object, str]
"""The operators of a library and an empty string, or None and the reason why it is not loaded."""

LOADERS: dict[Library, Callable[..., object]] = {
    "training": training.load,
    "steps": steps.load,
    "decoding": decoding.load,
    "vectors": vectors.load,
    "heap": heap.load,
    "matrix_unit": matrix_unit.load,
}
"""The function that loads each library. Libraries that take longest to compile are first, so that
compiling all of them in parallel takes less time."""


@dataclass(frozen=True)
class Operators:
    """The native operators of each library; None if a library is not available or not requested."""

    decoding: Decoding | None = None
    heap: Heap | None = None
    matrix_unit: MatrixUnit | None = None
    steps: Steps | None = None
    training: Training | None = None
    vectors: Vectors | None = None
    why_not: dict[Library, str] = field(default_factory=dict, compare=False, repr=False)
    """For each library that was requested but is not available, the reason in one line."""


def resolve(*libraries: Library, wait: bool) -> Operators:
    """Load native operators, if the CPU, the compiler and `WORKHORSE_NATIVE` permit.

    Args:
        libraries: the libraries to load.
        wait: True to compile missing libraries now, in parallel, which takes up to half a minute.
            False to compile them in the background; this process then runs without them.

    Raises:
        WorkhorseError: this CPU does not have the requested instructions.
    """

    def load(library: Library) -> Loaded:
        try:
            return LOADERS[library](wait=wait), ""
        except Unavailable as reason:  # storing it in a future would keep the caller's frames alive
            return None, str(reason)

    libraries = tuple(sorted(libraries, key=list(LOADERS).index))
    found: dict[str, Any] = {}
    why_not: dict[Library, str] = {}
    for library, (loaded, reason) in zip(libraries, _side_by_side(load, libraries), strict=True):
        if reason:
            why_not[library] = reason
        else:
            found[library] = loaded
    return Operators(**found, why_not=why_not)


def _side_by_side(load: Callable[[Library], Loaded], libraries: Sequence[Library]) -> list[Loaded]:
    """Call `load` for each library in parallel; return the results in order.

    The threads are daemons, so that an interrupt or exit does not wait for them.
    """
    futures = [Future[Loaded]() for _ in libraries]
    left: SimpleQueue[tuple[Library, Future[Loaded]]] = SimpleQueue()
    for job in zip(libraries, futures, strict=True):
        left.put(job)

    def work() -> None:
        with suppress(Empty):
            while True:
                library, future = left.get_nowait()
                try:
                    future.set_result(load(library))
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(min(len(futures), os.cpu_count() or 1)):
        Thread(target=work, daemon=True).start()
    return [future.result() for future in futures]
