"""Circuits: path patching, and the effects of the edges between parts of a model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from workhorse.config.arguments import check_choice, integer
from workhorse.errors import WorkhorseError, shown
from workhorse.inspect.attribution import gates_of, leaves_of
from workhorse.inspect.interventions import (
    Metric,
    Place,
    Tokens,
    clean_and_corrupt,
    effects_of,
    places_in,
    value_of,
    writer,
)
from workhorse.inspect.trace import Trace, Tracer
from workhorse.nn import Decoder

Method = Literal["exact", "gradient"]


@dataclass(frozen=True)
class Edges:
    """Effects of the edges between parts of a model.

    Attributes:
        sources: outputs of parts, which are added to the residual stream.
        receivers: tensors that are computed from the residual stream.
        scores: change of the metric if only this edge carries the corrupt value, (sources,
            receivers); NaN if there is no such edge.
    """

    sources: list[Place]
    receivers: list[Place]
    scores: Tensor

    def strongest(self, top: int) -> list[tuple[Place, Place, float]]:
        """The edges with the largest absolute scores, the largest first."""
        order = self.scores.abs().nan_to_num(-1).flatten().argsort(descending=True)
        order = order[: integer("top", top, 0)]
        pairs = [divmod(int(place), len(self.receivers)) for place in order]
        return [
            (self.sources[s], self.receivers[r], self.scores[s, r].item())
            for s, r in pairs
            if not self.scores[s, r].isnan()
        ]


def patch_path(
    decoder: Decoder,
    clean: Tokens,
    corrupt: Tokens,
    metric: Metric,
    *,
    source: Place,
    receivers: Sequence[Place],
) -> float:
    """Change of the metric if only the paths from a source to receivers carry the corrupt value.

    One pass has the corrupt value of the source. The outputs of all other attentions and
    feed-forwards stay as in the clean pass, so only direct paths count. In a second, clean pass,
    the receivers get their values of the first.

    Paper: Interpretability in the Wild, 2211.00593 §3.1; Localizing Model Behavior with Path
    Patching, 2304.05969.

    Args:
        decoder: see `Tracer`.
        clean: token ids, (batch, seq) or (seq).
        corrupt: token ids of the same shape.
        metric: function of the logits.
        source: an output, such as `Place("layers.0.attention.kernel", head)`,
            `Place("layers.0.feed_forward_branch")` or `Place("embedding")`.
        receivers: inputs, such as `Place("layers.1.attention.kernel.q", head)` (queries; also `.k`
            and `.v`), `Place("layers.1.feed_forward.x")` or `Place("head.x")` (the logits).
    """
    tracer = Tracer(decoder)
    _check_places("source", [source])
    _check_places("receivers", receivers)
    good, bad = clean_and_corrupt(tracer, clean, corrupt, ["*"])
    run = _direct(tracer, good, bad, source, [place.name for place in receivers])
    variant = {place: run[place.name] for place in receivers}
    after = effects_of(tracer, good.tokens, metric, [variant])
    return after.item() - value_of(metric, good.logits).item()


@torch.inference_mode(False)  # and gradients, even inside `no_grad`
def edge_scores(
    decoder: Decoder,
    clean: Tokens,
    corrupt: Tokens,
    metric: Metric,
    *,
    method: Method = "exact",
    sources: Sequence[Place] | None = None,
    receivers: Sequence[Place] | None = None,
) -> Edges:
    """The effect of every edge from the output of a part to the input of a later one.

    Papers: Towards Automated Circuit Discovery, 2304.14997 (edges); Attribution Patching
    Outperforms Automated Circuit Discovery, 2310.10348 (`gradient`).

    Args:
        decoder: see `Tracer`.
        clean: token ids, (batch, seq) or (seq).
        corrupt: token ids of the same shape.
        metric: function of the logits.
        method: `exact`: `patch_path` for every edge. `gradient`: its linear approximation, with
            one backward pass per receiver instead of one pass per edge.
        sources: default: the embedding, every head and every feed-forward.
        receivers: default: the queries, keys and values of every head, the input of every
            feed-forward, and the logits.

    Raises:
        WorkhorseError: see `trace`; or the shapes of `clean` and `corrupt` differ.
    """
    tracer = Tracer(decoder)
    check_choice("method", method, get_args(Method))
    _check_places("sources", sources or ())
    _check_places("receivers", receivers or ())
    good, bad = clean_and_corrupt(tracer, clean, corrupt, ["*"])
    outputs = list(sources or _sources(tracer.decoder, good))
    inputs = list(receivers or _receivers(tracer.decoder, good))
    linear = _linearised(tracer, good, [place.name for place in outputs])
    if method == "gradient":
        run = tracer(good.tokens, gradients=True)
        value = value_of(metric, run.logits)
        slopes = run.gradients(value, [place.name for place in inputs])
        changes = {place.name: bad[place.name] - good[place.name] for place in outputs}
        return Edges(outputs, inputs, _approximate(linear, slopes, changes, outputs, inputs))
    scores = torch.full((len(outputs), len(inputs)), torch.nan, dtype=torch.float64)
    before = value_of(metric, good.logits).item()
    for row, source in enumerate(outputs):
        later = [
            column
            for column, place in enumerate(inputs)
            if _gradients(linear[place.name].sum(), linear, [source.name])[0] is not None
        ]
        run = _direct(tracer, good, bad, source, [inputs[column].name for column in later])
        variants = [{inputs[column]: run[inputs[column].name]} for column in later]
        scores[row, later] = effects_of(tracer, good.tokens, metric, variants) - before
    return Edges(outputs, inputs, scores)


def _check_places(name: str, places: Sequence[Place]) -> None:
    listed = isinstance(places, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not listed or not all(isinstance(place, Place) for place in places):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WorkhorseError(f"{name}={shown(places)}; give a list of Place")


def _sources(decoder: Decoder, run: Trace) -> list[Place]:
    divided = (places_in(name, run[name], "heads") for name in leaves_of(decoder, "heads"))
    return [Place("embedding"), *(place for places in divided for place in places)]


def _receivers(decoder: Decoder, run: Trace) -> list[Place]:
    found: list[Place] = []
    for layer in range(len(decoder.layers)):
        for name in (f"layers.{layer}.attention.kernel.{letter}" for letter in "qkv"):
            found += places_in(name, run[name], "heads")
        found.append(Place(f"layers.{layer}.feed_forward.x"))
    return [*found, Place("head.x")]


def _direct(tracer: Tracer, good: Trace, bad: Trace, source: Place, keep: Sequence[str]) -> Trace:
    """A clean pass with a corrupt source, in which no other part reacts to it."""
    own = ".".join(source.name.split(".")[:3]).removesuffix("_branch")  # such as layers.0.attention
    outputs = leaves_of(tracer.decoder, "sublayers")
    fixed = {name: good[name] for name in outputs if name.removesuffix("_branch") != own}
    write = writer(source.name, [{source: bad[source.name]}], len(good.tokens))
    return tracer(good.tokens, edits={**fixed, source.name: write}, keep=keep)


def _linearised(tracer: Tracer, good: Trace, names: Sequence[str]) -> Trace:
    """A clean pass in which gradients reach the sources by direct paths only."""
    cuts: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(
        gates_of(tracer.decoder), Tensor.detach
    )
    for layer in range(len(tracer.decoder.layers)):
        cuts[f"layers.{layer}.attention.kernel"] = Tensor.detach
        if not any(name.startswith(f"layers.{layer}.feed_forward") for name in names):
            cuts[f"layers.{layer}.feed_forward_branch"] = Tensor.detach
    for name in names:
        cuts[name] = lambda x: x.detach().requires_grad_()
    return tracer(good.tokens, edits=cuts, gradients=True)


def _approximate(
    linear: Trace,
    slopes: Mapping[str, Tensor],
    changes: Mapping[str, Tensor],
    outputs: Sequence[Place],
    inputs: Sequence[Place],
) -> Tensor:
    """The gradient along each edge, times the change of its source.

    Args:
        linear: the pass of `_linearised`.
        slopes: gradients of the metric with respect to the receivers, by tensor.
        changes: corrupt values minus clean values of the sources, by tensor.
        outputs: the sources.
        inputs: the receivers.
    """
    scores = torch.full((len(outputs), len(inputs)), torch.nan, dtype=torch.float64)
    for column, receiver in enumerate(inputs):
        x = linear[receiver.name]
        along = (receiver.part(x) * receiver.part(slopes[receiver.name])).sum()
        gradients = dict(zip(changes, _gradients(along, linear, changes), strict=True))
        for row, source in enumerate(outputs):
            slope = gradients[source.name]
            if slope is not None:
                change = source.part(changes[source.name])
                scores[row, column] = (source.part(slope) * change).sum()
    return scores


def _gradients(of: Tensor, linear: Trace, names: Iterable[str]) -> Sequence[Tensor | None]:
    """Gradients with respect to sources; None for those that are not connected."""
    values = [linear[name] for name in names]
    return torch.autograd.grad(of, values, retain_graph=True, allow_unused=True)
