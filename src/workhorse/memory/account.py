"""The memory of a training step as plain data: what `plan` and `train --dry-run` show."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from workhorse.memory.step_memory import KINDS, Kind, Place, Span, StepMemory
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig

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
    gathered: Callable[[Span], int] | None = None,
    parallel: ParallelismConfig = UNDIVIDED,
) -> Iterator[Moment]:
    """The moments of a recorded step where a process has a share of each kind.

    Args:
        step: of the whole.
        shares: of each kind; 1 where left out.
        waiting: bytes of activations of other micro-batches, whose backward pass comes later:
            while the first one passes, and while those after it do.
        gathered: bytes of other processes, while a part of the step runs.
        parallel: tells how the gradients of parts are added up.
    """
    spans = iter([*step.spans, Span(len(step.totals), "", "update")])
    span, following = next(spans), next(spans)
    begins = [one.begin for one in step.spans if (one.part, one.phase) == ("embedding", "forward")]
    keeps_whole = parallel.is_exact and parallel.reshard == "step"
    gradients, left = step.timeline["gradients"], 0
    for moment in range(len(step.totals)):
        while moment >= following.begin:
            span, following = following, next(spans)
        kinds: dict[Kind, int] = {
            kind: round(step.timeline[kind][moment] * shares.get(kind, 1.0)) for kind in KINDS
        }
        if keeps_whole and span.phase != "update":
            # What passes before this one left is whole: in float32, gradients are their own sums.
            left = gradients[moment] if moment in begins else left
            share = shares.get("gradients", 1.0)
            kinds["gradients"] = round(left + (gradients[moment] - left) * share)
        own = span.phase == "update"
        if parallel.is_exact:  # the gradients of a part are copied after its pass, to be added up
            own = own or (span.part, span.phase) == ("embedding", "backward")
        if own:
            part = shares.get("weights", 1.0)
            kinds["temporary"] = round(kinds["temporary"] * part)
            kinds["sums"] = round(step.timeline["sums"][moment] * part)  # whole until then, or not
        if span.phase != "update":
            kinds["activations"] += waiting[len(begins) > 1 and moment >= begins[1]]
            kinds["temporary"] += gathered(span) if gathered else 0
        yield Moment(span.phase, span.part, kinds)


def ways_of(place: Place, shards: int, expert: int) -> int:
    """Into how many parts the weights of a place are divided."""
    return expert if expert > 1 and place.component == "experts" else shards


def whole_at_once(
    step: StepMemory, parallel: ParallelismConfig, device_type: str, *, tied: bool, has_head: bool
) -> Callable[[Span], int]:
    """Bytes of other processes that FSDP holds while a part of a step runs.

    The layer that computes and the next, prefetched (2304.11277 §3), have whole weights, the table
    of an untied embedding while it is looked up in, all else for the whole of a pass; with
    `reshard: step` everything does. Gradients are exchanged a layer's at a time, after its weights
    are gone, and those outside the layers at the end of the pass. Experts that processes divide
    stay where they are.

    Args:
        step: of the whole.
        parallel: how weights are divided.
        device_type: of the processes.
        tied: whether embedding and head are.
        has_head: whether this stage of a pipeline has the head.
    """
    weights, low_bits = (
        _whole_by_part(step.held[kind], parallel.expert) for kind in ("weights", "low_bits")
    )
    layers = [part for part in weights if is_of_layer(part)]
    tables = [] if tied else ["embedding"]
    outside = [part for part in weights if part not in (*layers, *tables)]

    def whole(parts: Iterable[str]) -> int:
        return sum(weights[part] for part in parts)

    def exchanged(parts: Iterable[str]) -> int:
        """Of gradients: what is sent, what is received, and its sum in float32."""
        sent, low = whole(parts), sum(low_bits[part] for part in parts)
        summed = sent + low  # in float32, of which low_bits are the other half
        if parallel.is_exact:  # what is received becomes float32, and nodes of a tree
            return sent + 2 * summed
        if parallel.adds_by_exchange(device_type):
            return 2 * sent + (summed // parallel.weight_parts if low else 0)
        return sent + summed

    layer = max(whole([part]) for part in layers)
    of_layer = max(exchanged([part]) for part in layers)
    table, root, kept = whole(tables), whole(outside), 0
    in_forward, in_backward = 2 * layer, max(3 * layer, layer + of_layer)
    if parallel.reshard == "step":
        table, root, kept = 0, 0, whole(weights)
        in_forward, in_backward = 0, of_layer
    of_head = weights["embedding" if tied else "head"] if has_head else 0
    last = 0 if tied else of_head  # PyTorch refers to a group's last gradient while it is exchanged
    at_end = max(exchanged(outside) + last + whole(tables), exchanged(tables) + whole(tables))

    def at(span: Span) -> int:
        if span.part == "embedding":
            return kept + (at_end if span.phase == "backward" else root + table)
        if not is_of_layer(span.part):
            return kept + root + of_head
        return kept + root + (of_head + in_backward if span.phase == "backward" else in_forward)

    return at


def _whole_by_part(places: Mapping[Place, int], expert: int) -> Counter[str]:
    """Bytes of each part of a model, of experts those that a process has."""
    parts: Counter[str] = Counter()
    for place, size in places.items():
        parts[place.part] += size // expert if place.component == "experts" else size
    return parts


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
