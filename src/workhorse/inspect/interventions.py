"""Causal effects of parts of a model: ablation and activation patching.

A metric is a function from logits (batch, seq, vocab) to a scalar. `ablate` and `patch` run the
decoder many times with some tensors replaced, and return how the metric changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import Tensor

from workhorse.config.arguments import check_choice
from workhorse.errors import WorkhorseError, shown
from workhorse.inspect.attribution import Parts, leaves_of
from workhorse.inspect.trace import Edits, Trace, Tracer, as_batch
from workhorse.nn import Decoder

Metric = Callable[[Tensor], Tensor]
Tokens = Tensor | Sequence[int]
Replacement = Literal["zero", "mean", "resample"]
TOKENS = 2048
"""Number of tokens of one pass, if several changes of the decoder share it."""


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
    check_choice("by", by, get_args(Replacement))
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
    before = value_of(metric, run.logits).item()
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
        variants = [{place: new} for place in places_in(name, own, parts)]
        found[name] = effects_of(tracer, tokens, metric, variants) - before
    return found


def patch(
    decoder: Decoder,
    clean: Tokens,
    corrupt: Tokens,
    metric: Metric,
    *,
    kinds: Sequence[str] = ("x", "attention_branch", "feed_forward_branch"),
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
    good, bad = clean_and_corrupt(tracer, clean, corrupt, [f"layers.*.{kind}" for kind in kinds])
    layers, seq = range(len(decoder.layers)), range(bad.tokens.shape[1])
    values: dict[str, Tensor] = {}
    for kind in kinds:
        names = [f"layers.{layer}.{kind}" for layer in layers]
        variants = [{Place(name, position=at): good[name]} for name in names for at in seq]
        effects = effects_of(tracer, bad.tokens, metric, variants)
        values[kind] = effects.view(len(layers), len(seq))
    before, after = (float(value_of(metric, run.logits).item()) for run in (good, bad))
    return Patching(before, after, values)


def value_of(metric: Metric, logits: Tensor) -> Tensor:
    """The metric of logits, checked."""
    value = metric(logits)
    if not isinstance(value, Tensor) or value.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WorkhorseError("metric did not return a scalar tensor; return one, such as a mean")
    return value


def effects_of(
    tracer: Tracer, tokens: Tensor, metric: Metric, variants: Sequence[Mapping[Place, Tensor]]
) -> Tensor:
    """The metric after each variant's replacements, (variants); several share a pass."""
    size = len(tokens)
    many = max(1, TOKENS // tokens.numel())
    found: list[float] = []
    for first in range(0, len(variants), many):
        chunk = variants[first : first + many]
        names = {place.name for variant in chunk for place in variant}
        edits: Edits = {name: writer(name, chunk, size) for name in names}
        logits = tracer(tokens.repeat(len(chunk), 1), edits=edits, keep=()).logits
        found += [value_of(metric, each).item() for each in logits.split(size)]
    return torch.tensor(found, dtype=torch.float64)


def writer(
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


def clean_and_corrupt(
    tracer: Tracer, clean: Tokens, corrupt: Tokens, keep: Sequence[str]
) -> tuple[Trace, Trace]:
    """Passes over clean and over corrupt tokens of the same shape."""
    good, bad = tracer(clean, keep=keep), tracer(corrupt, keep=keep)
    if good.tokens.shape != bad.tokens.shape:
        raise WorkhorseError(
            f"corrupt has shape {tuple(bad.tokens.shape)}; "
            f"give the shape of clean, {tuple(good.tokens.shape)}"
        )
    return good, bad


def places_in(name: str, x: Tensor, parts: Parts) -> Iterator[Place]:
    """The parts of a tensor of `leaves_of`: its heads or its neurons, or the whole tensor."""
    if x.ndim == 4:  # noqa: PLR2004
        return (Place(name, head) for head in range(x.shape[1]))
    if parts == "neurons" and name.endswith("down_proj.x"):
        return (Place(name, neuron) for neuron in range(x.shape[-1]))
    return iter([Place(name)])
