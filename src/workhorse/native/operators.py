"""What this machine can run: decided once by whoever builds, and handed to what computes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from workhorse.native import decoding, matrix_unit, training
from workhorse.native.build import Unavailable
from workhorse.native.decoding import Decoding
from workhorse.native.matrix_unit import MatrixUnit
from workhorse.native.training import Training

Library = Literal["decoding", "matrix_unit", "training"]


@dataclass(frozen=True)
class Operators:
    """The native operators that can be called, of those that were asked for."""

    decoding: Decoding | None = None
    matrix_unit: MatrixUnit | None = None
    training: Training | None = None
    why_not: dict[Library, str] = field(default_factory=dict, compare=False, repr=False)
    """For each library that was asked for and is not there, the reason in one line."""


def resolve(*libraries: Library, wait: bool) -> Operators:
    """The operators of some libraries, as far as this machine, the compiler and the switch allow.

    Args:
        libraries: which.
        wait: compile now what was never compiled on this machine, which takes some seconds each.
            Otherwise that happens in the background and this start goes without. Those of training
            are always waited for.

    Raises:
        WorkhorseError: instructions are asked for that this CPU has not.
    """
    found: dict[str, Any] = {}
    why_not: dict[Library, str] = {}
    for library in libraries:
        try:
            found[library] = _load(library, wait)
        except Unavailable as reason:
            why_not[library] = str(reason)
    return Operators(**found, why_not=why_not)


def _load(library: Library, wait: bool) -> Decoding | MatrixUnit | Training:
    if library == "training":
        return training.load()
    return decoding.load(wait=wait) if library == "decoding" else matrix_unit.load(wait=wait)
