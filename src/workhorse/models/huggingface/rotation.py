"""Rotations in `config.json`: how every family since LLaMA writes theta, fraction and scaling.

transformers 5 has one mapping, `rope_parameters`, or one for each kind of layer; older files have
`rope_theta`, `rope_scaling` and `partial_rotary_factor` beside each other. Both are read and both
are written. If a file has both mappings, `rope_scaling` counts, as in transformers.
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
"""Keys beside a rotation's mapping, and the key inside it that says the same."""


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
    """The rotation of a config.

    Args:
        hf: the config.
        theta: the family's default.
        theta_key: its key beside the mapping, one of `BESIDE`; None if that is passed over.
        fraction: the family's default fraction of a head that is rotated.
        fraction_key: its key beside the mapping, as `theta_key`.
        pairing: which features are paired; no config says it.
        layer_type: the kind of layer, if kinds have separate rotations.
        scaled: whether the scaling applies to this kind of layer.
        absent: the scaling of a config that does not mention rotation.
        older: what `rope_scaling` does to this kind of layer if `rope_parameters` has one mapping
            for each kind.
        more: further fields of `RopeConfig`.
    """
    rope = _rope_fields(hf, layer_type, older)
    if theta_key is not None:
        theta = hf.get(theta_key, theta)
    if fraction_key is not None:
        fraction = hf.get(fraction_key, fraction)
    theta = rope.get("rope_theta", theta)
    fraction = rope.get("partial_rotary_factor", fraction)
    counts = {"rope_theta": theta, "partial_rotary_factor": fraction}
    for beside, key in BESIDE.items():  # what is passed over without a line in `contradictions`
        if key in rope.values or hf.values.get(beside) == counts[key]:
            hf.ignore(beside)
    return RopeConfig(
        theta=theta,
        fraction=fraction,
        pairing=pairing,
        scaling=_read_scaling(rope, hf, absent) if scaled else None,
        **more,
    )


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """A line for each setting of the rotation that a config states twice and differently.

    `rope_scaling` counts before `rope_parameters`, and a value inside a mapping before one beside
    it, as in transformers.
    """
    found: list[str] = []
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name)
    if name == "rope_scaling" and _differs(values):
        found.append(
            "rope_scaling differs from rope_parameters; rope_scaling counts (repeat rope_theta in "
            "it, if the default is not meant)"
        )
    rope = cast(Data, rope) if isinstance(rope, Mapping) else {}
    mappings = [rope, *(cast(Data, one) for one in rope.values() if isinstance(one, Mapping))]
    for key, inner in BESIDE.items():
        beside = values.get(key)
        inside = [one[inner] for one in mappings if one.get(inner) is not None]
        if inside and beside is not None and beside not in inside:
            counts = " and ".join(dict.fromkeys(map(str, inside)))
            found.append(f"{key}={beside} is not the {counts} of {name}, which counts")
    return found


def _differs(values: Mapping[str, Any]) -> bool:
    """Whether `rope_scaling` says another rotation than `rope_parameters` beside it."""
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
    """`rope_scaling`, or else `rope_parameters`, in the order of transformers."""
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
    rope.ignore("full_attention", "sliding_attention")  # of kinds that no layer has
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
    """The context length of the original training, before it was extended.

    If it is given both beside the rotation and inside it, the one beside counts.
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
    if halfway and scaling.attention_factor is None:  # one without the other divides nothing
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
    "su": _longrope,  # the first name of Phi-3's files
}
_NAMES = {"dynamic_ntk": "dynamic"}
_KEYS = {"original_max_seq_len": "original_max_position_embeddings"}


def written_rope(position: Data) -> Data:
    """`rope_parameters` of a plain `RopeConfig`."""
    scaling: Data = dict(position["scaling"] or {"kind": "default"})
    kind = scaling.pop("kind")
    rope: Data = {"rope_type": _NAMES.get(kind, kind), "rope_theta": position["theta"]}
    if position["fraction"] != 1.0:
        rope["partial_rotary_factor"] = position["fraction"]
    return rope | {_KEYS.get(k, k): value for k, value in scaling.items() if value is not None}


def rope_parameters(data: Data) -> Data:
    """`rope_parameters` of the first layer with a rotation."""
    return written_rope(_first_rope(data))


def rope_scaling(data: Data) -> Data:
    """`rope_scaling` of the first layer with a rotation."""
    return older_scaling(written_rope(_first_rope(data)))


def older_scaling(rope: Data) -> Data:
    """`rope_scaling` of a written rotation, for readers older than transformers 5."""
    if rope["rope_type"] == "default":
        raise KeyError("rope_scaling")  # older readers want no mapping at all
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
"""How a rotation shared by all layers is written."""
