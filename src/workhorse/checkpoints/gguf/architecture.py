"""One architecture of llama.cpp as data, and whether a config of ours fits it.

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
from typing import Any, Literal

from workhorse.config.errors import as_written
from workhorse.models.huggingface.family import MISSING, FieldPath, compare_plain, look_up, plain
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.nn.attention.self_attention import QKNormConfig
from workhorse.nn.blocks import BlockConfig, PreNormConfig
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig
from workhorse.nn.feedforward import GatedMlpConfig, MlpConfig
from workhorse.nn.norms import LayerNormConfig, NormConfig, RMSNormConfig
from workhorse.nn.positions.absolute import NoPositionConfig
from workhorse.nn.positions.rope import RopeConfig

WINDOW = "attention.window"
THETA = "attention.position.theta"
SCALING = "attention.position.scaling"
FRACTION = "attention.position.fraction"

Data = dict[str, Any]


def put(data: Data, path: str, value: object) -> None:
    """Set the value of a field, if its parent exists."""
    *outer, last = path.split(".")
    inner: Any = data
    for part in outer:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict) and last in inner:
        inner[last] = value


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


RMS = RMSNormConfig()
LAYER = LayerNormConfig()
BIASLESS = LayerNormConfig(bias=False)

ROTARY = AttentionConfig(n_heads=1, position=RopeConfig())
LOCAL = ROTARY.replace(window=1)
NO_POSITION = ROTARY.replace(position=NoPositionConfig())
BIASED = ROTARY.replace(qkv_bias=True, out_bias=True)
HEAD_NORM = QKNormConfig(norm=RMS)
FULL_NORM = QKNormConfig(norm=RMS, over="full")

SWIGLU = GatedMlpConfig(d_ff=1)
GEGLU = GatedMlpConfig(d_ff=1, activation="gelu_tanh")
GELU = MlpConfig(d_ff=1, activation="gelu_tanh")
BIASED_GELU = GELU.replace(bias=True)

TIED = HeadConfig(tied=True)
LLAMA = PreNormConfig(norm=RMS, attention=ROTARY, feed_forward=SWIGLU)

QKV = ("attn_q", "attn_k", "attn_v")
GATE_UP = ("ffn_gate", "ffn_up")
REORDERED = {"attention_norm": "post_attention_norm", "feed_forward_norm": "post_ffw_norm"}

TIE, ATTENTION_BIASES = "head.tied", ("attention.qkv_bias", "attention.out_bias")


def turns(block: BlockConfig) -> bool:
    """Whether a layer has rotary positions."""
    return block.rope is not None


def divided_logits(keys: Data) -> Data:
    """Granite: the file holds the divisor of the logits, our config the multiplier."""
    return {"head.multiplier": 1 / keys["logit_scale"]}


def local_layers_unscaled(data: Data) -> str | None:
    """Layers with a window have the unscaled rotation, whatever the others have."""
    for layer in data["layers"]:
        attention = layer["attention"]
        if attention["window"] is not None and attention["position"].get("scaling") is not None:
            return "the rotation of a layer with a window is scaled"
    return None


def some_window(data: Data) -> str | None:
    """llama.cpp assumes that at least one layer has a window."""
    windows = (layer["attention"]["window"] for layer in data["layers"])
    return None if any(windows) else "no layer has a sliding window"


def no_position_every_fourth(data: Data) -> str | None:
    """Layers 4, 8, 12 … have no positions, and no other."""
    for number, layer in enumerate(data["layers"], start=1):
        if (layer["attention"]["position"]["kind"] == "none") != (number % 4 == 0):
            return f"layer {number} is not among every fourth without positions, or should be"
    return None


def windows_at_64_layers(data: Data) -> str | None:
    """EXAONE 4: 64 layers have windows and no positions elsewhere; other depths have neither."""
    attentions = [layer["attention"] for layer in data["layers"]]
    deep = len(attentions) == 64  # noqa: PLR2004 the published depth, which llama.cpp goes by
    for attention in attentions:
        wide, turning = attention["window"] is None, attention["position"]["kind"] == "rope"
        if (wide and deep) == turning or (not wide and not deep):
            return f"windows and positions are not as in EXAONE 4 of {len(attentions)} layers"
    return None


def equal_heads(data: Data) -> str | None:
    """The same number of heads for keys and values as for queries."""
    attention = data["layers"][0]["attention"]
    return None if attention["n_heads"] == attention["n_kv_heads"] else "its heads are grouped"


def fewer_than_64_layers(data: Data) -> str | None:
    """Cohere: llama.cpp requires norms on queries and keys from 64 layers on."""
    return None if data["n_layers"] < 64 else "64 layers or more need norms on queries and keys"  # noqa: PLR2004
