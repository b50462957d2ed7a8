"""The memory of a training step as plain data: what `plan` and `train --dry-run` show."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from workhorse.train.step.step_memory import KINDS, Kind, Place, StepMemory

Held = dict[Kind, dict[Place, int]]


class Moment(NamedTuple):
    """What a device holds while some operator of a step runs, in bytes."""

    phase: str
    part: str
    kinds: dict[Kind, int]


def fullest(memory: StepMemory) -> Moment:
    """The moment of a recorded step at which most is held."""
    span = memory.span_at(memory.peak_moment)
    return Moment(span.phase, span.part, {kind: memory.peak.get(kind, 0) for kind in KINDS})


def account(
    held: Held, activations: dict[str, int], peak: Moment, room: int | None
) -> dict[str, Any]:
    """What is held between steps, what activations take, and what the fullest moment needs.

    Args:
        held: between steps, by kind and place in the model.
        activations: of a micro-batch, by part of the model.
        peak: the fullest moment.
        room: bytes that the device has; None if that is not known.

    Returns:
        Bytes: `held` by kind and component, `parts` (the same by part and kind), `activations`,
        `peak` (by kind, with `total`, and the `phase` and `part` of the step where it is), `room`;
        and whether it `fits`, None if that is not known.
    """
    total = sum(peak.kinds.values())
    return {
        "held": _grouped(held, lambda kind, place: (kind, place.component)),
        "parts": _grouped(held, lambda kind, place: (place.part, kind)),
        "activations": activations,
        "peak": {"phase": peak.phase, "part": peak.part, **peak.kinds, "total": total},
        "room": room,
        "fits": None if room is None else total <= room,
    }


def _grouped(
    held: Held, names: Callable[[Kind, Place], tuple[str, str]]
) -> dict[str, dict[str, int]]:
    """Bytes under the two names that a kind and a place get."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, places in held.items():
        for place, n_bytes in places.items():
            outer, inner = names(kind, place)
            sizes[outer][inner] += n_bytes
    return {name: dict(inner) for name, inner in sizes.items()}
