"""The native operators that this machine can run: resolved once, when a model or step is built."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from workhorse.native import decoding, heap, matrix_unit, replay, steps, training, vectors
from workhorse.native.build import Unavailable
from workhorse.native.decoding import Decoding
from workhorse.native.heap import Heap
from workhorse.native.matrix_unit import MatrixUnit
from workhorse.native.replay import Replay
from workhorse.native.steps import Steps
from workhorse.native.training import Training
from workhorse.native.vectors import Vectors

Library = Literal["decoding", "heap", "matrix_unit", "replay", "steps", "training", "vectors"]


LOADERS: dict[Library, Callable[..., object]] = {
    "decoding": decoding.load,
    "heap": heap.load,
    "matrix_unit": matrix_unit.load,
    "replay": replay.load,
    "steps": steps.load,
    "training": training.load,
    "vectors": vectors.load,
}


@dataclass(frozen=True)
class Operators:
    """The native operators that can be called; None for the others."""

    decoding: Decoding | None = None
    heap: Heap | None = None
    matrix_unit: MatrixUnit | None = None
    replay: Replay | None = None
    steps: Steps | None = None
    training: Training | None = None
    vectors: Vectors | None = None
    why_not: dict[Library, str] = field(default_factory=dict, compare=False, repr=False)
    """For each requested library that is not available, the reason in one line."""


def resolve(*libraries: Library, wait: bool) -> Operators:
    """The operators of these libraries that the CPU, the compiler and the switch allow.

    Args:
        libraries: the libraries to load.
        wait: compile now those that never were on this machine, side by side, which takes up to
            twenty seconds. Otherwise they are compiled in the background, and this process runs
            without them. Training passes true.

    Raises:
        WorkhorseError: this CPU does not have the instructions asked for.
    """

    def load(library: Library) -> tuple[object, str]:
        try:
            return LOADERS[library](wait=wait), ""
        except Unavailable as reason:  # a future that kept it would keep the caller's frames
            return None, str(reason)

    found: dict[str, Any] = {}
    why_not: dict[Library, str] = {}
    threads = ThreadPoolExecutor(os.cpu_count())
    try:
        for library, (loaded, reason) in zip(libraries, threads.map(load, libraries), strict=True):
            if reason:
                why_not[library] = reason
            else:
                found[library] = loaded
    finally:  # an interrupt waits for no compiler
        threads.shutdown(wait=False, cancel_futures=True)
    return Operators(**found, why_not=why_not)
