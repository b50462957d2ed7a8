"""The memory of a training step as plain data, for `plan` and `train --dry-run`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from workhorse.memory.step_memory import KINDS, Kind, Place, Span, StepMemory
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig

LAYER = "layers."


def is_of_layer(name: str) -> bool:
    """True if a parameter or a part of the model with this name is inside a layer."""
    return name.startswith(LAYER)


BytesByPlace = dict[Kind, dict[Place, int]]


class Moment(NamedTuple):
    """The bytes that a device holds while one operator of a training step runs."""

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
    """Yield the bytes that one rank holds during each operator of a recorded step.

    Args:
        step: the step recorded without sharding.
        shares: the fraction of each kind of memory that the rank holds; 1 for missing kinds.
        waiting: bytes of the activations of other micro-batches that wait for their backward
            pass: while the first micro-batch runs, and while a later one runs.
        gathered: function from a span to the bytes gathered from other ranks during it.
        parallel: the parallelism settings; they decide how gradients are summed.
    """
    gradients, left = step.timeline["gradients"], 0
    spans = iter([*step.spans, Span(len(gradients), "", "update")])
    span, following = next(spans), next(spans)
    begins = [one.begin for one in step.spans if (one.part, one.phase) == ("embedding", "forward")]
    keeps_whole = parallel.is_exact and parallel.reshard == "step"
    columns = [
        [round(n_bytes * share) for n_bytes in step.timeline[kind]]
        for kind, share in (dict.fromkeys(KINDS, 1.0) | dict(shares)).items()
    ]
    for moment, row in enumerate(zip(*columns, strict=True)):
        while moment >= following.begin:
            span, following = following, next(spans)
        kinds: dict[Kind, int] = dict(zip(KINDS, row, strict=True))
        if keeps_whole and span.phase != "update":
            # Gradients of earlier passes stay unsharded; in float32 they are added up in place.
            left = gradients[moment] if moment in begins else left
            share = shares.get("gradients", 1.0)
            kinds["gradients"] = round(left + (gradients[moment] - left) * share)
        own = span.phase == "update"
        if parallel.is_exact:
            # After the backward pass of a logical shard, its gradients are copied and then summed.
            own = own or (span.part, span.phase) == ("embedding", "backward")
        if own:
            part = shares.get("weights", 1.0)
            kinds["temporary"] = round(kinds["temporary"] * part)
            kinds["sums"] = round(step.timeline["sums"][moment] * part)  # sharded from here on
        if span.phase != "update":
            kinds["activations"] += waiting[len(begins) > 1 and moment >= begins[1]]
            kinds["temporary"] += gathered(span) if gathered else 0
        yield Moment(span.phase, span.part, kinds)


def ways_of(place: Place, shards: int, expert: int) -> int:
    """Number of ranks that divide the weights at a place in the model.

    It is `expert` for routed experts under expert parallelism, 1 for a teacher, otherwise `shards`.
    """
    if place.component == "teacher":
        return 1
    return expert if expert > 1 and place.component == "experts" else shards


def whole_at_once(
    step: StepMemory, parallel: ParallelismConfig, device_type: str, *, tied: bool, has_head: bool
) -> Callable[[Span], int]:
    """Return a function that maps a span of a step to the bytes that FSDP has gathered.

    A span is a period in which one part of the model runs.

    - Layers: the weights of the current layer and of the next, prefetched one are gathered
      (2304.11277 §3). Gradients are exchanged after the weights of their layer are freed.
    - Outside the layers, weights are gathered for a whole pass, but an untied embedding table only
      during its lookup. Gradients are exchanged at the end of the pass.
    - With `reshard: step`, all weights stay gathered.
    - Experts under expert parallelism are not gathered.

    Args:
        step: the step recorded without sharding.
        parallel: the parallelism settings.
        device_type: type of the ranks' devices.
        tied: True if embedding and head share a weight.
        has_head: True if this pipeline stage has the head.
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
        """Bytes of the gradients of these parts, sent and received, and of their float32 sum."""
        sent, low = whole(parts), sum(low_bits[part] for part in parts)
        summed = sent + low  # float32: low_bits have the other half of its bytes
        if parallel.is_exact:  # received gradients become float32 nodes of the summation tree
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
    last = 0 if tied else of_head  # FSDP keeps the last gradient of a group while exchanging it
    at_end = max(exchanged(outside) + last + whole(tables), exchanged(tables) + whole(tables))

    def at(span: Span) -> int:
        if span.part == "embedding":
            return kept + (at_end if span.phase == "backward" else root + table)
        if not is_of_layer(span.part):
            return kept + root + of_head
        return kept + root + (of_head + in_backward if span.phase == "backward" else in_forward)

    return at


def _whole_by_part(places: Mapping[Place, int], expert: int) -> Counter[str]:
    """Bytes of each part of a model, such as a layer. Only the experts of one rank are counted."""
    parts: Counter[str] = Counter()
    for place, size in places.items():
        parts[place.part] += size // expert if place.component == "experts" else size
    return parts


def account(
    held: BytesByPlace, activations: dict[str, int], peak: Moment, room: int | None
) -> dict[str, Any]:
    """Summarise the memory of a step as plain data: between steps, activations and peak.

    Args:
        held: bytes held between steps, by kind and place in the model.
        activations: bytes of a micro-batch's activations, by part of the model.
        peak: the moment with the most memory.
        room: memory of the device in bytes; None: unknown.

    Returns:
        Bytes: `held` by kind and component, `parts` (the bytes of `held` by part of the model and
        kind), `activations`, `peak` (by kind, with `total`, and its `phase` and `part` of the
        step) and `room`. `fits` is True if the peak fits into `room`, None if `room` is unknown.
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
    held: BytesByPlace, names: Callable[[Kind, Place], tuple[str, str]]
) -> dict[str, dict[str, int]]:
    """Sum bytes under the two names that `names` gives for a kind and a place."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, places in held.items():
        for place, n_bytes in places.items():
            outer, inner = names(kind, place)
            sizes[outer][inner] += n_bytes
    return {name: dict(inner) for name, inner in sizes.items()}
