"""One architecture of llama.cpp as data, and whether it computes what a config of ours says.

llama.cpp's forward passes are fixed: a GGUF file fills in sizes and a few numbers. So an
`Architecture` says what is fixed as kinds of layer in our own config language, and names the fields
that a file carries. A decoder fits when every field is carried or agrees; else the first that does
neither is the reason why not. Nothing is left out in silence.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from workhorse.checkpoints.gguf.places import (
    FRACTION,
    MISSING,
    SCALING,
    THETA,
    WINDOW,
    Data,
    Place,
    compare_plain,
    look_up,
    plain,
    put,
)
from workhorse.config_errors import as_written
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.embedding import EmbeddingConfig
from workhorse.nn.head import HeadConfig
from workhorse.nn.norms import NormConfig

SIZES = (
    "attention.n_heads",
    "attention.n_kv_heads",
    "attention.head_dim",
    THETA,
    "feed_forward.d_ff",
    "feed_forward.n_experts",
    "feed_forward.top_k",
    "feed_forward.shared.d_ff",
)
"""Numbers of a layer that every file carries."""

MEANINGLESS = (
    "norm.multiply",
    "norm.precision",
    "norm.offset",
    "attention.position.pairing",
    "attention.position.precision",
    "embedding.round_multiplier",
    "attention.qk_norm.norm.multiply",
    "attention.qk_norm.norm.precision",
    "attention.qk_norm.norm.offset",
)
"""What differs in low precision only, or is worked into the weights: 1 + w, the order of rows."""

APPROXIMATIONS: tuple[tuple[str, object, object, str], ...] = (
    (
        "feed_forward.activation",
        "gelu",
        "gelu_tanh",
        "llama.cpp computes GELU in its tanh form; logits differ in the fourth digit",
    ),
    (
        "attention.position.scaling.truncate",
        False,
        True,
        "llama.cpp rounds the ends of YaRN's ramp to whole pairs; angles differ a little",
    ),
    (
        "attention.position.scaling.kind",
        "longrope",
        "longrope",
        "llama.cpp chooses LongRoPE's factors by the room of its context, not by the text's length",
    ),
)
"""A field, our value, what llama.cpp has instead, and what to tell the user."""

_FIXED_SCALING: dict[str, Data] = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}
"""Of a rotary scaling, what llama.cpp has no key for."""
Scale = Callable[[Data], float]


def usual_scale(data: Data) -> float:
    """`1/sqrt(head_dim)`."""
    return 1 / math.sqrt(data["layers"][0]["attention"]["head_dim"])


@dataclass(frozen=True)
class Architecture:
    """What one of llama.cpp's architectures computes, and how its file says the rest.

    Attributes:
        name: `general.architecture`.
        model_types: those of Hugging Face that it serves.
        layers: the kinds of layer it can compute; the fields in `carried` are placeholders.
        carried: fields of a layer that the file says, beside `SIZES`, where both have them.
        optional: fields of a layer, of embedding or of head that may be there or not.
        varying: carried fields that layers with and without a window, or dense and mixed ones,
            may have of their own.
        scalings: kinds of rotary scaling it knows.
        final_norm: before the head; the layers' kind of norm where not given.
        embedding: as `layers`.
        head: as `layers`.
        embedding_by_width: the embedding is multiplied by `sqrt(d_model)`.
        scale: of the scores, where the file does not say it.
        pairing: which features its rotation turns together.
        keys: metadata beside what every architecture has, and where their values stand.
        names: its names of our modules, where they are not the usual ones.
        fused: its names of several modules' weights one below the other.
        copied_head: a tied head is written all the same.
        square: heads together must be as wide as the model.
        check: what no field can say alone; returns the reason why a config does not fit.
        may_be: to read a file: whether a kind of layer stands at a number in a model of these keys,
            where tensors and window do not tell.
        solved: to read a file: what its keys make of fields that `keys` has a function for.
        window_every: to read a file that does not list them: all layers but every such have the
            window.
    """

    name: str
    model_types: tuple[str, ...]
    layers: tuple[BlockConfig, ...]
    carried: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("head.tied",)
    varying: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ("linear", "yarn")
    final_norm: NormConfig | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    embedding_by_width: bool = False
    scale: Scale = usual_scale
    pairing: Literal["half", "interleaved"] = "half"
    keys: Mapping[str, Place] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copied_head: bool = False
    square: bool = False
    check: Callable[[Data], str | None] = lambda _: None
    may_be: Callable[[BlockConfig, int, Data], bool] = lambda block, number, keys: True
    solved: Callable[[Data], Data] = lambda keys: {}
    window_every: int = 1

    def difference(self, data: Data) -> str | None:
        """What of a plain config this architecture cannot compute, or None; see `differences`."""
        return next(iter(self.differences(data)), None)

    def differences(self, data: Data) -> list[str]:
        """Everything of a plain config that this architecture cannot compute.

        Args:
            data: of `readable`.
        """
        layers: list[Data] = data["layers"]
        norm = layers[0]["norm"]
        expected = {**data, "layers": [self._closest(layer, data) for layer in layers]}
        for part in ("embedding", "head", "final_norm"):
            expected[part] = self._filled(self._fixed[part], data[part], f"{part}.")
        expected["embedding"]["width"] = data["d_model"]
        for one in (expected["final_norm"], expected["embedding"]["norm"]):
            _share_eps(one, norm)
        if self.embedding_by_width:
            expected["embedding"]["multiplier"] = math.sqrt(data["d_model"])
        if found := [str(one) for one in compare_plain(data, expected)]:
            return found  # the checks that follow are of a config that has the right parts
        rules = (
            self._uneven(layers),
            self._not_square(data),
            _odd_rotation(layers),
            self.check(data),
        )
        return [rule for rule in rules if rule is not None]

    @property
    def windows(self) -> bool:
        """Whether some of its layers have a sliding window."""
        return any(getattr(kind.attention, "window", None) for kind in self.layers)

    @cached_property
    def _fixed(self) -> Data:
        """What is fixed, as the plain data of a decoder that has each kind of layer once."""
        names = [str(number) for number in range(len(self.layers))]
        config = DecoderConfig(
            vocab_size=1,
            d_model=2,
            n_layers=len(names),
            max_seq_len=1,
            embedding=self.embedding,
            blocks=dict(zip(names, self.layers, strict=True)),
            pattern=tuple(names),
            final_norm=self.final_norm or self.layers[0].norm,
            head=self.head,
        )
        return plain(config)

    def _closest(self, layer: Data, data: Data) -> Data:
        """The kind of layer that differs in the fewest fields, in none if one agrees."""
        kinds = [self._expected(kind, layer, data) for kind in self._fixed["layers"]]
        return min(kinds, key=lambda kind: sum(1 for _ in compare_plain(layer, kind)))

    def _expected(self, kind: Data, layer: Data, data: Data) -> Data:
        kind = self._filled(kind, layer)
        attention = kind["attention"]
        if attention["kind"] == "attention":
            attention["value_dim"] = attention["head_dim"]
            if "attention.scale" not in self.carried:
                attention["scale"] = self.scale(data)
        for norm in (attention.get("norm"), (attention.get("qk_norm") or {}).get("norm")):
            if norm is not None:
                _share_eps(norm, layer["norm"])
        return kind

    def _filled(self, fixed: Data, actual: Data, prefix: str = "") -> Data:
        """The fixed fields, with what a file carries taken from the actual ones."""
        fixed = copy.deepcopy(fixed)
        own = ("eps", *(place.removeprefix("norm.") for place in MEANINGLESS[:3]))
        for place in (*SIZES, *MEANINGLESS, *own, "norm.eps", *self.carried, *self.optional):
            inner = place.removeprefix(prefix)
            value, theirs = look_up(actual, inner), look_up(fixed, inner)
            if MISSING in (value, theirs):
                continue
            if place in self.optional or (value is not None and theirs is not None):
                put(fixed, inner, value)
        scaling = look_up(actual, SCALING)
        if isinstance(scaling, dict) and scaling["kind"] in self.scalings:
            put(fixed, SCALING, scaling | _FIXED_SCALING.get(scaling["kind"], {}))
        return fixed

    def _uneven(self, layers: list[Data]) -> str | None:
        """A carried field with one key in the file and several values in the layers."""
        for place in ("kind", *SIZES, SCALING, "norm.eps", *self.carried, *self.optional):
            seen: dict[object, object] = {}
            for layer in layers:
                value = look_up(layer, place)
                if value is MISSING:
                    continue
                group = _group(layer) if place in self.varying else None
                if seen.setdefault(group, value) != value:
                    return (
                        f"layers differ in {place}: {as_written(seen[group])} and "
                        f"{as_written(value)}"
                    )
        return None

    def _not_square(self, data: Data) -> str | None:
        attention = data["layers"][0]["attention"]
        if not self.square or attention["n_heads"] * attention["head_dim"] == data["d_model"]:
            return None
        return f"n_heads · head_dim is not d_model={data['d_model']}"


def _odd_rotation(layers: list[Data]) -> str | None:
    """llama.cpp turns as many features as it spreads frequencies over."""
    for layer in layers:
        fraction = look_up(layer, FRACTION)
        if isinstance(fraction, float) and "head_dim" in layer["attention"]:
            turning = int(layer["attention"]["head_dim"] * fraction)
            if turning % 2:
                return f"attention.position turns {turning} features, an odd number"
    return None


def _group(layer: Data) -> tuple[bool, str]:
    """Kinds of layer that have keys of their own: with a window or not, dense or mixed."""
    return look_up(layer, WINDOW) is None, layer["feed_forward"]["kind"]


def _share_eps(norm: Data, other: Data) -> None:
    """llama.cpp has one epsilon for all norms."""
    if norm["kind"] == other["kind"] and "eps" in norm:
        norm["eps"] = other["eps"]


def readable(config: DecoderConfig, *, windows: bool) -> tuple[Data, list[str]]:
    """A config as the plain data that an architecture can compute, and what it costs.

    Args:
        config: ours.
        windows: whether the architecture knows sliding windows; else the context is cut to the
            narrowest, within which a window changes nothing.
    """
    data, remarks = plain(config), list[str]()
    layers: list[Data] = data["layers"]
    for place, ours, theirs, remark in APPROXIMATIONS:
        for layer in layers:
            if look_up(layer, place) == ours:
                put(layer, place, theirs)
                remarks += [remark] if remark not in remarks else []
    if not windows:
        narrowest = min(_windows(layers), default=data["max_seq_len"])
        if narrowest < data["max_seq_len"]:
            remarks.append(
                f"llama.cpp has no sliding window here; the file's context is {narrowest} tokens, "
                "within which it changes nothing"
            )
        data["max_seq_len"] = min(narrowest, data["max_seq_len"])
        for layer in layers:
            put(layer, WINDOW, None)
    return data, remarks


def _windows(layers: Iterable[Data]) -> list[int]:
    found: list[Any] = [look_up(layer, WINDOW) for layer in layers]
    return [window for window in found if isinstance(window, int)]
