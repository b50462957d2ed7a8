"""The memory of a training step as plain data: what `plan` and `train --dry-run` show."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from workhorse.parallel.config import ParallelismConfig
from workhorse.train.step.step_memory import KINDS, Kind, Place, Span, StepMemory

LAYER = "layers."


def is_of_layer(name: str) -> bool:
    """Whether a parameter, or a part of a model, belongs to a layer."""
    return name.startswith(LAYER)


Held = dict[Kind, dict[Place, int]]


class Moment(NamedTuple):
    """What a device holds while some operator of a step runs, in bytes."""

    phase: str
    part: str
    kinds: dict[Kind, int]


def moments_of_part(
    step: StepMemory,
    shares: Mapping[Kind, float],
    waiting: tuple[int, int] = (0, 0),
    gathered: int = 0,
    *,
    exact: bool = False,
) -> Iterator[Moment]:
    """The moments of a recorded step where a process has a share of each kind.

    Args:
        step: of the whole.
        shares: of each kind; 1 where left out.
        waiting: bytes of activations of other micro-batches, whose backward pass comes later:
            while the first one passes, and while those after it do.
        gathered: bytes of other processes, while layers compute.
        exact: whether the gradients of parts are added up in a tree.
    """
    spans = iter([*step.spans, Span(len(step.totals), "", "update")])
    span, following = next(spans), next(spans)
    begins = [one.begin for one in step.spans if (one.part, one.phase) == ("embedding", "forward")]
    for moment in range(len(step.totals)):
        while moment >= following.begin:
            span, following = following, next(spans)
        kinds: dict[Kind, int] = {
            kind: round(step.timeline[kind][moment] * shares.get(kind, 1.0)) for kind in KINDS
        }
        own = span.phase == "update"
        if exact:  # the gradients of a part are copied after its pass, to be added up
            own = own or (span.part, span.phase) == ("embedding", "backward")
        if own:
            kinds["temporary"] = round(kinds["temporary"] * shares.get("weights", 1.0))
        if span.phase != "update":
            kinds["activations"] += waiting[len(begins) > 1 and moment >= begins[1]]
            kinds["temporary"] += gathered
        yield Moment(span.phase, span.part, kinds)


def ways_of(place: Place, shards: int, expert: int) -> int:
    """Into how many parts the weights of a place are divided."""
    return expert if expert > 1 and place.component == "experts" else shards


def whole_at_once(step: StepMemory, parallel: ParallelismConfig, device_type: str) -> int:
    """Bytes that FSDP holds whole for a moment, at its largest layer.

    The layer's weights and the next one's, prefetched (2304.11277 §3); its gradient, and that of
    the layer before, until it is sent. The one being sent is float32 unless `adds_by_exchange`.
    With exact sums what is received is float32, and so is what it is added to. Experts that
    processes divide stay where they are.
    """
    layers: dict[str, int] = defaultdict(int)
    wide = 2 if parallel.is_exact else int(not parallel.adds_by_exchange(device_type))
    times_of: dict[Kind, int] = {"weights": 4, "low_bits": wide}  # together they are float32
    for kind, times in times_of.items():
        for place, size in step.held[kind].items():
            own = size // parallel.expert if place.component == "experts" else size
            layers[place.part] += times * own
    return max(size for part, size in layers.items() if is_of_layer(part))


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
