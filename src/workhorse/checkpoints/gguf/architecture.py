"""One architecture of llama.cpp as data, and whether it computes what a config of ours says.

llama.cpp's forward passes are fixed: a GGUF file fills in sizes and a few numbers. So an
`Architecture` states what is fixed as kinds of layer in our own config classes, and names the
fields that a file carries. A decoder fits if every field is carried or agrees; otherwise the first
that does neither is the reason. Nothing is silently ignored.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from workhorse.checkpoints.gguf.field_paths import (
    FRACTION,
    MISSING,
    SCALING,
    THETA,
    WINDOW,
    Data,
    FieldPath,
    compare_plain,
    look_up,
    plain,
    put,
)
from workhorse.config.errors import as_written
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
"""Sizes of a layer that every file carries."""

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
"""Fields that matter only in low precision, or are folded into the weights: 1 + w, row order."""

_FIXED_SCALING: dict[str, Data] = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}
"""Fields of a rotary scaling that llama.cpp has no key for."""
Scale = Callable[[Data], float]


def usual_scale(data: Data) -> float:
    """`1/sqrt(head_dim)`."""
    return 1 / math.sqrt(data["layers"][0]["attention"]["head_dim"])


@dataclass(frozen=True)
class Architecture:
    """What one of llama.cpp's architectures computes, and how its file gives the rest.

    Attributes:
        name: `general.architecture`.
        model_types: those of Hugging Face that it serves.
        layers: the kinds of layer it can compute; the fields in `carried` are placeholders.
        carried: fields of a layer that the file carries, besides `SIZES`, if both have them.
        optional: fields of a layer, of the embedding or of the head that may be present or not.
        varying: carried fields that may differ between layers with and without a window, or between
            dense layers and mixtures.
        scalings: kinds of rotary scaling it supports.
        final_norm: before the head; the layers' kind of norm by default.
        embedding: like `layers`.
        head: like `layers`.
        embedding_by_width: the embedding is multiplied by `sqrt(d_model)`.
        scale: factor on the scores, if the file does not give it.
        pairing: which features its rotation pairs.
        keys: metadata besides what every architecture has, and the fields with their values.
        names: its names for our modules, where they are not the usual ones.
        fused: its names for the stacked weights of several modules.
        copied_head: a tied head is written nevertheless.
        square: the heads together must be as wide as the model.
        check: a rule over several fields; returns the reason why a config does not fit.
        may_be: for reading: whether a kind of layer may be at an index in a model with these keys,
            where tensors and window do not tell.
        solved: for reading: the values of fields that `keys` has a function for.
        window_every: for reading a file that does not list them: all layers but every
            `window_every`-th have the window.
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
    keys: Mapping[str, FieldPath] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copied_head: bool = False
    square: bool = False
    check: Callable[[Data], str | None] = lambda _: None
    may_be: Callable[[BlockConfig, int, Data], bool] = lambda block, number, keys: True
    solved: Callable[[Data], Data] = lambda keys: {}
    window_every: int = 1

    def difference(self, data: Data) -> str | None:
        """The first field that this architecture cannot compute, or None; see `differences`."""
        return next(iter(self.differences(data)), None)

    def differences(self, data: Data) -> list[str]:
        """Everything in a plain config that this architecture cannot compute.

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
        """The fixed parts, as the plain data of a decoder that has each kind of layer once."""
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
        """The kind of layer that differs in the fewest fields; in none if one agrees."""
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
        own = ("eps", *(path.removeprefix("norm.") for path in MEANINGLESS[:3]))
        for path in (*SIZES, *MEANINGLESS, *own, "norm.eps", *self.carried, *self.optional):
            inner = path.removeprefix(prefix)
            value, theirs = look_up(actual, inner), look_up(fixed, inner)
            if MISSING in (value, theirs):
                continue
            if path in self.optional or (value is not None and theirs is not None):
                put(fixed, inner, value)
        scaling = look_up(actual, SCALING)
        if isinstance(scaling, dict) and scaling["kind"] in self.scalings:
            put(fixed, SCALING, scaling | _FIXED_SCALING.get(scaling["kind"], {}))
        return fixed

    def _uneven(self, layers: list[Data]) -> str | None:
        """A carried field that has one key in the file but several values in the layers."""
        for path in ("kind", *SIZES, SCALING, "norm.eps", *self.carried, *self.optional):
            seen: dict[object, object] = {}
            for layer in layers:
                value = look_up(layer, path)
                if value is MISSING:
                    continue
                group = _group(layer) if path in self.varying else None
                if seen.setdefault(group, value) != value:
                    return (
                        f"layers differ in {path}: {as_written(seen[group])} and "
                        f"{as_written(value)}"
                    )
        return None

    def _not_square(self, data: Data) -> str | None:
        attention = data["layers"][0]["attention"]
        if not self.square or attention["n_heads"] * attention["head_dim"] == data["d_model"]:
            return None
        return f"n_heads · head_dim is not d_model={data['d_model']}"


def _odd_rotation(layers: list[Data]) -> str | None:
    """llama.cpp rotates exactly the features that it spreads frequencies over."""
    for layer in layers:
        fraction = look_up(layer, FRACTION)
        if isinstance(fraction, float) and "head_dim" in layer["attention"]:
            turning = int(layer["attention"]["head_dim"] * fraction)
            if turning % 2:
                return f"attention.position turns {turning} features, an odd number"
    return None


def _group(layer: Data) -> tuple[bool, str]:
    """Groups of layers that have separate keys: with or without a window, dense or mixture."""
    return look_up(layer, WINDOW) is None, layer["feed_forward"]["kind"]


def _share_eps(norm: Data, other: Data) -> None:
    """llama.cpp has one epsilon for all norms."""
    if norm["kind"] == other["kind"] and "eps" in norm:
        norm["eps"] = other["eps"]
