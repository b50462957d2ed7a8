"""Describes a llama.cpp architecture as data, and checks whether a decoder config fits it.

llama.cpp's forward passes are fixed: a GGUF file only fills in sizes and a few other values. So an
`Architecture` describes the fixed layers with Workhorse's own config classes, and lists the fields
that a file stores. A decoder fits if each of its fields is stored in the file or has the
architecture's value. Other fields are reported.
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
    """Set the value at a dotted path in nested mappings; do nothing if there is no such path."""
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
"""Paths of the layer sizes that every GGUF file stores."""

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
"""Fields that a GGUF file does not store, because llama.cpp does not need them.

Some only affect rounding in low precision. The others are applied to the weights before they are
written: norm offsets are added (1 + w), and rows are reordered for RoPE.
"""

_FIXED_SCALING: dict[str, Data] = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}
"""Fields of a RoPE scaling that have no GGUF key, with llama.cpp's fixed values."""
Scale = Callable[[Data], float]


def usual_scale(data: Data) -> float:
    """Return the usual attention scale, `1/sqrt(head_dim)`."""
    return 1 / math.sqrt(data["layers"][0]["attention"]["head_dim"])


@dataclass(frozen=True)
class Architecture:
    """A llama.cpp architecture: its fixed computation, and the keys and tensors of its files.

    Attributes:
        name: value of `general.architecture`.
        model_types: Hugging Face model types that it can compute.
        layers: one config for each supported kind of layer. Fields that the file stores have
            placeholder values here.
        carried: paths of fields that the file stores in addition to `SIZES`. A path that a layer
            does not have is skipped.
        optional: paths of fields that may have any value, such as biases and a tied head.
        varying: paths of stored fields that may differ between layers with and without a window, or
            between dense layers and mixtures of experts.
        scalings: supported kinds of RoPE scaling.
        final_norm: the norm before the head; by default the norm of the layers.
        embedding: the embedding, with placeholders as in `layers`.
        head: the head, with placeholders as in `layers`.
        embedding_by_width: True if the embedding is multiplied by `sqrt(d_model)`.
        scale: function that returns the attention scale, if the file does not store it.
        pairing: RoPE rotates pairs of features: adjacent ones (`interleaved`), or one from each
            half (`half`).
        keys: metadata keys in addition to those of every architecture. The value is the path of a
            field, or a function that computes the key's value.
        names: tensor names that differ from the usual ones, by the name of our module.
        fused: tensors that stack the weights of several modules, by name.
        copied_head: True if a tied head is written to the file as well.
        square: True if `n_heads * head_dim` must equal `d_model`.
        check: function that checks several fields together. It returns the reason why a config
            does not fit, or None.
        may_be: function for reading a file. It returns True if a layer can be of a kind. It is
            needed if the layer's tensor names and window fit several kinds. Its arguments are the
            kind, the layer's index and the file's keys.
        solved: function for reading a file. It returns the values of the fields that `keys` writes
            with a function, by path.
        window_every: used for reading a file that does not list the layers with a window. Every
            `window_every`-th layer has none and the others have one; with 1, all have one.
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
        """Describe the first field that this architecture cannot compute; None if there is none."""
        return next(iter(self.differences(data)), None)

    def differences(self, data: Data) -> list[str]:
        """Describe each field of a config that this architecture cannot compute.

        Args:
            data: the config as plain data, from `write.readable`.
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
            return found  # the rules below need a config with the right parts
        rules = (
            self._uneven(layers),
            self._not_square(data),
            _odd_rotation(layers),
            self.check(data),
        )
        return [rule for rule in rules if rule is not None]

    @property
    def windows(self) -> bool:
        """True if the architecture has layers with a sliding window."""
        return any(getattr(kind.attention, "window", None) for kind in self.layers)

    @cached_property
    def _fixed(self) -> Data:
        """A config with the architecture's fixed values and one layer of each supported kind."""
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
        """Return the supported kind of layer that is most similar to `layer`.

        The fields that a GGUF file stores are copied from `layer`.
        """
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
        """Return a copy of `fixed` in which the fields that a file stores come from `actual`."""
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
        """Return an error message if layers differ in a field that the file stores only once."""
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
    """Return an error message if RoPE rotates an odd number of features in a layer.

    llama.cpp can only rotate pairs of features.
    """
    for layer in layers:
        fraction = look_up(layer, FRACTION)
        if isinstance(fraction, float) and "head_dim" in layer["attention"]:
            turning = int(layer["attention"]["head_dim"] * fraction)
            if turning % 2:
                return f"attention.position rotates {turning} features, which is an odd number"
    return None


def _group(layer: Data) -> tuple[bool, str]:
    """Return a layer's group: with or without a window, dense or mixture of experts.

    The layers of a group share metadata keys.
    """
    return look_up(layer, WINDOW) is None, layer["feed_forward"]["kind"]


def _share_eps(norm: Data, other: Data) -> None:
    """Copy the epsilon of another norm of the same kind: llama.cpp has only one for all norms."""
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
    """Return True if a layer uses rotary positions (RoPE)."""
    return block.rope is not None


GRANITE = ("residual_multiplier", "attention.scale", "embedding.multiplier", "head.multiplier")
GRANITE_KEYS: Mapping[str, FieldPath] = {
    "logit_scale": lambda data: 1 / data["head"]["multiplier"],
    "residual_scale": "block.residual_multiplier",
    "embedding_scale": "embedding.multiplier",
    "attention.scale": "block.attention.scale",
}


def divided_logits(keys: Data) -> Data:
    """Compute Granite's logit multiplier from the file's keys, which store its reciprocal."""
    return {"head.multiplier": 1 / keys["logit_scale"]}


def local_layers_unscaled(data: Data) -> str | None:
    """Return an error message if a layer with a window has RoPE scaling.

    llama.cpp scales RoPE only in layers without a window.
    """
    for layer in data["layers"]:
        attention = layer["attention"]
        if attention["window"] is not None and attention["position"].get("scaling") is not None:
            return "a layer with a sliding window has RoPE scaling"
    return None


def some_window(data: Data) -> str | None:
    """Return an error message if no layer has a window: llama.cpp assumes that some have one."""
    windows = (layer["attention"]["window"] for layer in data["layers"])
    return None if any(windows) else "no layer has a sliding window"


def no_position_every_fourth(data: Data) -> str | None:
    """Return an error message unless exactly layers 4, 8, 12 … have no positions."""
    for number, layer in enumerate(data["layers"], start=1):
        if (layer["attention"]["position"]["kind"] == "none") != (number % 4 == 0):
            return f"layer {number} breaks the rule that only every fourth layer has no positions"
    return None


def windows_at_64_layers(data: Data) -> str | None:
    """Return an error message if windows or positions do not match EXAONE 4.

    With 64 layers, EXAONE 4 has rotary positions in layers with a window and no positions in the
    others. With any other number of layers, it has no window and rotary positions in all layers.
    """
    attentions = [layer["attention"] for layer in data["layers"]]
    deep = len(attentions) == 64  # noqa: PLR2004 the published depth, which llama.cpp compares with
    for attention in attentions:
        wide, turning = attention["window"] is None, attention["position"]["kind"] == "rope"
        if (wide and deep) == turning or (not wide and not deep):
            return f"windows and positions differ from EXAONE 4 with {len(attentions)} layers"
    return None


def equal_heads(data: Data) -> str | None:
    """Return an error message if there are fewer heads for keys and values than for queries."""
    attention = data["layers"][0]["attention"]
    return None if attention["n_heads"] == attention["n_kv_heads"] else "n_kv_heads is not n_heads"


def fewer_than_64_layers(data: Data) -> str | None:
    """Return an error message for a Cohere model with 64 layers or more.

    llama.cpp expects norms on queries and keys in models of that depth.
    """
    return None if data["n_layers"] < 64 else "64 layers or more need norms on queries and keys"  # noqa: PLR2004
