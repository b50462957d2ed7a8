"""Reads and writes the RoPE settings of `config.json`: theta, rotated fraction and scaling.

transformers 5 has one mapping, `rope_parameters`, or one for each kind of layer. Older files have
`rope_theta`, `rope_scaling` and `partial_rotary_factor` as separate top-level keys. Both forms are
read and written. If a file has both mappings, `rope_scaling` wins, as in transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from workhorse.config.base import ConfigError
from workhorse.errors import nearest
from workhorse.models.huggingface.fields import Fields
from workhorse.nn.positions.rope import (
    DynamicNtkScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RopeConfig,
    RopeScalingConfig,
    YarnScalingConfig,
)

Data = dict[str, Any]
BESIDE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_theta",
    "rope_local_base_freq": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
"""Top-level RoPE keys, mapped to the equivalent keys inside `rope_parameters`."""


def read_rope(
    hf: Fields,
    *,
    theta: float = 10_000.0,
    theta_key: str | None = "rope_theta",
    fraction: float = 1.0,
    fraction_key: str | None = "partial_rotary_factor",
    pairing: Literal["half", "interleaved"] = "half",
    layer_type: str = "",
    scaled: bool = True,
    absent: RopeScalingConfig | None = None,
    older: Literal["replaces", "updates", "ignored"] = "replaces",
    **more: Any,
) -> RopeConfig:
    """Read the RoPE settings of a config.

    Args:
        hf: the config.
        theta: the family's default theta.
        theta_key: top-level key of theta, one of `BESIDE`; None to ignore such keys.
        fraction: default fraction of each head that is rotated.
        fraction_key: top-level key of the fraction; None to ignore such keys.
        pairing: how RoPE pairs features; it depends on the family, not on a key of the config.
        layer_type: layer type to read, if `rope_parameters` has one mapping for each layer type.
        scaled: True if the scaling applies to this layer type.
        absent: scaling for a config without RoPE settings.
        older: if `rope_scaling` replaces or updates `rope_parameters` of this layer type, or is
            ignored.
        more: further fields of `RopeConfig` to set.
    """
    rope = _rope_fields(hf, layer_type, older)
    if theta_key is not None:
        theta = hf.get(theta_key, theta)
    if fraction_key is not None:
        fraction = hf.get(fraction_key, fraction)
    theta = rope.get("rope_theta", theta)
    fraction = rope.get("partial_rotary_factor", fraction)
    counts = {"rope_theta": theta, "partial_rotary_factor": fraction}
    for beside, key in BESIDE.items():  # ignored keys that get no line from `conflicting_settings`
        if key in rope.values or hf.values.get(beside) == counts[key]:
            hf.ignore(beside)
    return RopeConfig(
        theta=theta,
        fraction=fraction,
        pairing=pairing,
        scaling=_read_scaling(rope, hf, absent) if scaled else None,
        **more,
    )


def conflicting_settings(values: Mapping[str, Any]) -> list[str]:
    """Return a warning for each RoPE setting that a config gives twice with different values.

    `rope_scaling` wins over `rope_parameters`, and a value inside a mapping wins over a top-level
    value, as in transformers.
    """
    found: list[str] = []
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name)
    if name == "rope_scaling" and _differs(values):
        found.append(
            "rope_scaling differs from rope_parameters; rope_scaling is used (set rope_theta in it "
            "unless the default is right)"
        )
    rope = cast(Data, rope) if isinstance(rope, Mapping) else {}
    mappings = [rope, *(cast(Data, one) for one in rope.values() if isinstance(one, Mapping))]
    for key, inner in BESIDE.items():
        beside = values.get(key)
        inside = [one[inner] for one in mappings if one.get(inner) is not None]
        if inside and beside is not None and beside not in inside:
            counts = " and ".join(dict.fromkeys(map(str, inside)))
            found.append(f"{key}={beside} is ignored; {name} has {counts}")
    return found


def _differs(values: Mapping[str, Any]) -> bool:
    """True if `rope_scaling` and `rope_parameters` describe different settings."""
    older, newer = values["rope_scaling"], values.get("rope_parameters")
    if not (isinstance(older, Mapping) and isinstance(newer, Mapping) and newer):
        return False
    newer = cast(Data, newer)
    found = newer.get("full_attention", newer)
    if not isinstance(found, Mapping):
        return False
    beside = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    said: list[Data] = []
    for one in (cast(Data, older), cast(Data, found)):
        whole = {**beside, **one}
        whole["rope_type"] = whole.get("rope_type", whole.pop("type", "default"))
        said.append({key: value for key, value in whole.items() if value is not None})
    return said[0] != said[1]


def rope_section(hf: Fields) -> Fields | None:
    """Return `rope_scaling` if it is given, else `rope_parameters`, as transformers does."""
    for key in ("rope_scaling", "rope_parameters"):
        if hf.values.get(key):
            return hf.section(key)
    return None


def _rope_fields(
    hf: Fields, layer_type: str, older: Literal["replaces", "updates", "ignored"]
) -> Fields:
    hf.ignore("rope_scaling", "rope_parameters")
    rope = rope_section(hf) or Fields({})
    by_type = hf.section("rope_parameters") if older != "replaces" else None
    if by_type and by_type.values:
        nested = by_type.section(layer_type) or by_type
        if older == "ignored" or rope.values == by_type.values:
            return nested
        nested.ignore(*nested.values)
        rope.ignore(*rope.values)
        return Fields({**nested.values, **rope.values}, rope.where)
    rope.ignore("full_attention", "sliding_attention")  # layer types that no layer has
    nested = rope.section(layer_type) if layer_type else None
    return nested or rope


def _read_scaling(
    rope: Fields, hf: Fields, absent: RopeScalingConfig | None
) -> RopeScalingConfig | None:
    if not rope.values:
        return absent
    name = rope.get("rope_type", rope.get("type", "default"))
    if name in ("default", "proportional_default"):
        return None
    if name not in _SCALINGS:
        raise ConfigError(
            f"{rope.where}: rope_type {name!r} is unknown; {nearest(name, _SCALINGS)}"
        )
    return _SCALINGS[name](rope, hf)


def _context(hf: Fields) -> int:
    return hf.need("max_position_embeddings", int)


def _original(rope: Fields, hf: Fields) -> int:
    """Read the context length that the model was first trained with, before it was extended.

    If it is given both at the top level and inside the mapping, the top level wins.
    """
    inside = rope.optional("original_max_position_embeddings", int)
    beside = hf.optional("original_max_position_embeddings", int)
    return beside or inside or _context(hf)


def _linear(rope: Fields, hf: Fields) -> LinearScalingConfig:
    del hf
    return LinearScalingConfig(factor=rope.need("factor", float))


def _dynamic(rope: Fields, hf: Fields) -> DynamicNtkScalingConfig:
    rope.ignore("original_max_position_embeddings")
    return DynamicNtkScalingConfig(
        factor=rope.need("factor", float), original_max_seq_len=_context(hf)
    )


def _yarn(rope: Fields, hf: Fields) -> YarnScalingConfig:
    original = _original(rope, hf)
    scaling = YarnScalingConfig(
        factor=rope.get("factor", _context(hf) / original),
        original_max_seq_len=original,
        beta_fast=rope.get("beta_fast", 32.0),
        beta_slow=rope.get("beta_slow", 1.0),
        mscale=rope.get("mscale", 1.0),
        mscale_all_dim=rope.optional("mscale_all_dim", float),
        attention_factor=rope.optional("attention_factor", float),
        truncate=rope.get("truncate", True),
    )
    halfway = scaling.mscale_all_dim and not rope.get("mscale", 0.0)
    if halfway and scaling.attention_factor is None:  # transformers divides only if both are given
        return scaling.replace(attention_factor=scaling.growth(1.0))
    return scaling


def _llama3(rope: Fields, hf: Fields) -> Llama3ScalingConfig:
    return Llama3ScalingConfig(
        factor=rope.need("factor", float),
        low_freq_factor=rope.need("low_freq_factor", float),
        high_freq_factor=rope.need("high_freq_factor", float),
        original_max_seq_len=_original(rope, hf),
    )


def _longrope(rope: Fields, hf: Fields) -> LongRopeScalingConfig:
    original = _original(rope, hf)
    return LongRopeScalingConfig(
        short_factor=tuple(rope.sequence("short_factor", float) or ()),
        long_factor=tuple(rope.sequence("long_factor", float) or ()),
        original_max_seq_len=original,
        factor=rope.get("factor", _context(hf) / original),
        attention_factor=rope.optional("attention_factor", float),
    )


_SCALINGS: dict[str, Callable[[Fields, Fields], RopeScalingConfig]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # older name, in Phi-3's first files
}
_NAMES = {"dynamic_ntk": "dynamic"}
_KEYS = {"original_max_seq_len": "original_max_position_embeddings"}


def written_rope(position: Data) -> Data:
    """Return `rope_parameters` for `config.json`, from a `RopeConfig` as plain data."""
    scaling: Data = dict(position["scaling"] or {"kind": "default"})
    kind = scaling.pop("kind")
    rope: Data = {"rope_type": _NAMES.get(kind, kind), "rope_theta": position["theta"]}
    if position["fraction"] != 1.0:
        rope["partial_rotary_factor"] = position["fraction"]
    return rope | {_KEYS.get(k, k): value for k, value in scaling.items() if value is not None}


def rope_parameters(data: Data) -> Data:
    """Return `rope_parameters` for `config.json`, from the first layer with RoPE."""
    return written_rope(_first_rope(data))


def rope_scaling(data: Data) -> Data:
    """Return `rope_scaling` for `config.json`, from the first layer with RoPE."""
    return older_scaling(written_rope(_first_rope(data)))


def older_scaling(rope: Data) -> Data:
    """Convert `rope_parameters` to `rope_scaling`, for readers older than transformers 5."""
    if rope["rope_type"] == "default":
        raise KeyError("rope_scaling")  # older readers expect no mapping at all
    return {key: value for key, value in rope.items() if key != "rope_theta"}


def _first_rope(data: Data) -> Data:
    positions = (layer["attention"]["position"] for layer in data["layers"])
    return next(
        (one for one in positions if one["kind"] == "rope"), data["block"]["attention"]["position"]
    )


ROPE_KEYS: dict[str, Callable[[Data], object]] = {
    "rope_parameters": rope_parameters,
    "rope_theta": lambda data: _first_rope(data)["theta"],
    "rope_scaling": rope_scaling,
}
"""RoPE keys of `config.json` if all layers share their settings, with functions of their values."""
