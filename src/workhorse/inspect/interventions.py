"""Causal effects of parts of a model: ablation, activation patching and path patching.

A metric is a function from logits (batch, seq, vocab) to a scalar. Each function here runs the
decoder many times with some tensors replaced, and returns how the metric changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.generate.checks import whole
from workhorse.inspect.attribution import Parts, leaves_of
from workhorse.inspect.trace import Edits, Trace, Tracer, as_batch
from workhorse.nn import Decoder

Metric = Callable[[Tensor], Tensor]
Tokens = Tensor | Sequence[int]
Replacement = Literal["zero", "mean", "resample"]
Method = Literal["exact", "gradient"]
TOKENS = 2048
"""Number of tokens of one pass, if several changes of the decoder share it."""
_BRANCHES = ("attention_branch", "feed_forward_branch")


@dataclass(frozen=True)
class Place:
    """A tensor of a pass, or a part of it.

    Attributes:
        name: our name of the tensor, such as `layers.0.attention.kernel`.
        index: a head of a tensor (batch, heads, seq, width), a feature of a tensor (batch, seq,
            width), or None for all.
        position: a position in the sequence, or None for all.

    Raises:
        WorkhorseError: the name is from TransformerLens, with its order of axes; or an index is not
            an integer.
    """

    name: str
    index: int | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        if "hook_" in str(self.name):
            raise WorkhorseError(
                f"{self.name} is a name of TransformerLens; give ours, as in list(run)"
            )
        for at in (self.index, self.position):
            if isinstance(at, bool) or not isinstance(at, Integral | None):
                raise WorkhorseError(f"{self}: {shown(at)} is not an index; give an integer")

    def part(self, x: Tensor) -> Tensor:
        """This part of the tensor, as a view."""
        features = 1 if x.ndim == 4 else -1  # noqa: PLR2004
        for axis, at in ((-2, self.position), (features, self.index)):
            if at is not None:
                if not -x.shape[axis] <= at < x.shape[axis]:
                    raise WorkhorseError(
                        f"{self}: {at} is not one of {x.shape[axis]}; count from 0"
                    )
                x = x.narrow(axis, at, 1)
        return x

    def replaced(self, x: Tensor, by: Tensor) -> Tensor:
        """A copy of the tensor with this part of another."""
        x = x.clone()
        self.part(x).copy_(self.part(by))
        return x

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.name}{index}" + ("" if self.position is None else f" at {self.position}")


@dataclass(frozen=True)
class Patching:
    """Result of `patch`.

    Attributes:
        clean: the metric of the clean tokens.
        corrupt: the metric of the corrupt tokens.
        values: by kind of tensor, the metric of the corrupt tokens with one vector of the clean
            pass, (layers, seq).
    """

    clean: float
    corrupt: float
    values: dict[str, Tensor]

    @property
    def restored(self) -> dict[str, Tensor]:
        """`values` as fractions: 0 is the metric of the corrupt tokens, 1 of the clean tokens."""
        whole = self.clean - self.corrupt
        return {kind: (each - self.corrupt) / whole for kind, each in self.values.items()}


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
        order = order[: whole("top", top, 0)]
        pairs = [divmod(int(place), len(self.receivers)) for place in order]
        return [
            (self.sources[s], self.receivers[r], self.scores[s, r].item())
            for s, r in pairs
            if not self.scores[s, r].isnan()
        ]


def ablate(
    decoder: Decoder,
    tokens: Tokens,
    metric: Metric,
    *,
    parts: Parts = "heads",
    by: Replacement = "zero",
    others: Tokens | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Replace the output of one part at a time, at all positions.

    Args:
        decoder: see `Tracer`.
        tokens: token ids, (batch, seq) or (seq).
        metric: function of the logits.
        parts: `heads`, `neurons` or `sublayers`; see `attribute`.
        by: zeros; each feature's mean over the positions of `others`; or the values of `others`.
        others: token ids; default for the mean: `tokens`.
        names: tensors to ablate, if not all; see the keys of the result.

    Returns:
        By tensor, the changes of the metric: (heads) for heads, (d_ff) for neurons, otherwise (1).

    Raises:
        WorkhorseError: see `trace`; `others` has another shape than `tokens` for `resample`; or
            there is no such name.
    """
    tracer = Tracer(decoder)
    _check_choice("by", by, get_args(Replacement))
    tokens = as_batch(tokens, decoder)
    known = leaves_of(tracer.decoder, parts)
    for name in names or ():
        if name not in known:
            raise WorkhorseError(f"names: {name!r} is not one of {', '.join(known)}; choose these")
    others = tokens if others is None and by == "mean" else others
    if by != "zero" and others is None:
        raise WorkhorseError("by='resample' needs other tokens; give others")
    run = tracer(tokens, keep=names or known)
    other = run if others is None else tracer(others, keep=names or known)
    before = _metric(metric, run.logits)
    found: dict[str, Tensor] = {}
    for name in names or known:
        own, new = run[name], other[name]
        if by == "zero":
            new = torch.zeros_like(own)
        elif by == "mean":
            new = new.mean((0, -2), keepdim=True).expand_as(own)
        elif new.shape != own.shape:
            raise WorkhorseError(
                f"others has shape {tuple(other.tokens.shape)}; "
                f"give the shape of tokens, {tuple(tokens.shape)}"
            )
        variants = [{place: new} for place in _divided(name, own, parts)]
        found[name] = _effects(tracer, tokens, metric, variants) - before
    return found


def patch(
    decoder: Decoder,
    clean: Tokens,
    corrupt: Tokens,
    metric: Metric,
    *,
    kinds: Sequence[str] = ("x", *_BRANCHES),
) -> Patching:
    """Run the corrupt tokens with one vector of the clean pass, for every layer and position.

    Paper: Locating and Editing Factual Associations in GPT, 2202.05262 §2.

    Args:
        decoder: see `Tracer`.
        clean: token ids, (batch, seq) or (seq).
        corrupt: token ids of the same shape.
        metric: function of the logits.
        kinds: tensors of a layer. The default is its input, and the outputs of its attention and
            its feed-forward.

    Raises:
        WorkhorseError: see `trace`; or the shapes of `clean` and `corrupt` differ.
    """
    tracer = Tracer(decoder)
    if isinstance(kinds, str):
        raise WorkhorseError(f"kinds={kinds!r} is not a list; give [{kinds!r}]")
    good, bad = _pair(tracer, clean, corrupt, [f"layers.*.{kind}" for kind in kinds])
    layers, seq = range(len(decoder.layers)), range(bad.tokens.shape[1])
    values: dict[str, Tensor] = {}
    for kind in kinds:
        names = [f"layers.{layer}.{kind}" for layer in layers]
        variants = [{Place(name, position=at): good[name]} for name in names for at in seq]
        effects = _effects(tracer, bad.tokens, metric, variants)
        values[kind] = effects.view(len(layers), len(seq))
    before, after = (_metric(metric, run.logits) for run in (good, bad))
    return Patching(before, after, values)


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
    good, bad = _pair(tracer, clean, corrupt, ["*"])
    run = _direct(tracer, good, bad, source, [place.name for place in receivers])
    variant = {place: run[place.name] for place in receivers}
    after = _effects(tracer, good.tokens, metric, [variant])
    return after.item() - _metric(metric, good.logits)


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
    _check_choice("method", method, get_args(Method))
    _check_places("sources", sources or ())
    _check_places("receivers", receivers or ())
    good, bad = _pair(tracer, clean, corrupt, ["*"])
    outputs = list(sources or _sources(tracer.decoder, good))
    inputs = list(receivers or _receivers(tracer.decoder, good))
    linear = _linearised(tracer, good, [place.name for place in outputs])
    if method == "gradient":
        whole = tracer(good.tokens, gradients=True)
        value = metric(whole.logits)
        _as_float(value)
        slopes = whole.gradients(value, [place.name for place in inputs])
        changes = {place.name: bad[place.name] - good[place.name] for place in outputs}
        return Edges(outputs, inputs, _approximate(linear, slopes, changes, outputs, inputs))
    scores = torch.full((len(outputs), len(inputs)), torch.nan, dtype=torch.float64)
    before = _metric(metric, good.logits)
    for row, source in enumerate(outputs):
        later = [
            column
            for column, place in enumerate(inputs)
            if _gradients(linear[place.name].sum(), linear, [source.name])[0] is not None
        ]
        run = _direct(tracer, good, bad, source, [inputs[column].name for column in later])
        variants = [{inputs[column]: run[inputs[column].name]} for column in later]
        scores[row, later] = _effects(tracer, good.tokens, metric, variants) - before
    return Edges(outputs, inputs, scores)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise WorkhorseError(f"{name}={shown(value)}; choose one of {', '.join(choices)}")


def _check_places(name: str, places: Sequence[Place]) -> None:
    for place in places if isinstance(places, Sequence) else [places]:  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(place, Place) or place is places:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WorkhorseError(f"{name}={shown(places)}; give a list of Place")


def _metric(metric: Metric, logits: Tensor) -> float:
    return _as_float(metric(logits))


def _as_float(value: Tensor) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WorkhorseError("metric did not return a scalar tensor; return one, such as a mean")
    return float(value.item())


def _effects(
    tracer: Tracer, tokens: Tensor, metric: Metric, variants: Sequence[Mapping[Place, Tensor]]
) -> Tensor:
    """The metric after each variant's replacements, (variants); several share a pass."""
    size = len(tokens)
    many = max(1, TOKENS // tokens.numel())
    found: list[float] = []
    for first in range(0, len(variants), many):
        chunk = variants[first : first + many]
        names = {place.name for variant in chunk for place in variant}
        edits: Edits = {name: _writer(name, chunk, size) for name in names}
        logits = tracer(tokens.repeat(len(chunk), 1), edits=edits, keep=()).logits
        found += [_metric(metric, each) for each in logits.split(size)]
    return torch.tensor(found, dtype=torch.float64)


def _writer(
    name: str, chunk: Sequence[Mapping[Place, Tensor]], size: int
) -> Callable[[Tensor], Tensor]:
    """An edit that writes each variant's replacements into its rows."""

    def write(x: Tensor) -> Tensor:
        if len(x) != size * len(chunk):
            raise WorkhorseError(
                f"{name} has {len(x)} rows for {size * len(chunk)} sequences, so they cannot be "
                "changed separately; choose another tensor"
            )
        for rows, variant in zip(x.split(size), chunk, strict=True):
            for place, value in variant.items():
                if place.name == name:
                    place.part(rows).copy_(place.part(value))
        return x

    return write


def _pair(
    tracer: Tracer, clean: Tokens, corrupt: Tokens, keep: Sequence[str]
) -> tuple[Trace, Trace]:
    good, bad = tracer(clean, keep=keep), tracer(corrupt, keep=keep)
    if good.tokens.shape != bad.tokens.shape:
        raise WorkhorseError(
            f"corrupt has shape {tuple(bad.tokens.shape)}; "
            f"give the shape of clean, {tuple(good.tokens.shape)}"
        )
    return good, bad


def _divided(name: str, x: Tensor, parts: Parts) -> Iterator[Place]:
    """The parts of a tensor of `leaves_of`: its heads or its neurons, or the whole tensor."""
    if x.ndim == 4:  # noqa: PLR2004
        return (Place(name, head) for head in range(x.shape[1]))
    if parts == "neurons" and name.endswith("down_proj.x"):
        return (Place(name, neuron) for neuron in range(x.shape[-1]))
    return iter([Place(name)])


def _sources(decoder: Decoder, run: Trace) -> list[Place]:
    divided = (_divided(name, run[name], "heads") for name in leaves_of(decoder, "heads"))
    return [Place("embedding"), *(place for places in divided for place in places)]


def _receivers(decoder: Decoder, run: Trace) -> list[Place]:
    found: list[Place] = []
    for layer in range(len(decoder.layers)):
        for name in (f"layers.{layer}.attention.kernel.{letter}" for letter in "qkv"):
            found += _divided(name, run[name], "heads")
        found.append(Place(f"layers.{layer}.feed_forward.x"))
    return [*found, Place("head.x")]


def _direct(tracer: Tracer, good: Trace, bad: Trace, source: Place, keep: Sequence[str]) -> Trace:
    """A clean pass with a corrupt source, in which no other part reacts to it."""
    own = [*source.name.split("."), ""]  # layers, its number, the part
    edits: dict[str, Tensor] = {
        name: good[name]
        for layer in range(len(tracer.decoder.layers))
        for part, name in ((each, f"layers.{layer}.{each}") for each in _BRANCHES)
        if own[:2] != ["layers", str(layer)] or own[2].removesuffix("_branch") not in part
    }
    new = source.replaced(good[source.name], bad[source.name])
    return tracer(good.tokens, edits={**edits, source.name: new}, keep=keep)


def _linearised(tracer: Tracer, good: Trace, names: Sequence[str]) -> Trace:
    """A clean pass in which gradients reach the sources by direct paths only."""
    cuts: dict[str, Callable[[Tensor], Tensor]] = {
        f"layers.{layer}.attention.gate.proj": Tensor.detach
        for layer, block in enumerate(tracer.decoder.layers)
        if hasattr(getattr(block.attention, "gate", None), "proj")
    }
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
                scores[row, column] = (source.part(slope) * change).sum().item()
    return scores


def _gradients(of: Tensor, linear: Trace, names: Iterable[str]) -> Sequence[Tensor | None]:
    """Gradients with respect to sources; None for those that are not connected."""
    values = [linear[name] for name in names]
    return torch.autograd.grad(of, values, retain_graph=True, allow_unused=True)
