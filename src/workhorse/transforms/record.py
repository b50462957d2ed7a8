"""The transforms that a model carries, in the order of application, and the orders allowed.

A decoder holds its record, so it keeps it when it is copied, wrapped for training or sharded;
saving, exporting and sharding ask `transforms_of`. Every transform calls `check` before it changes
anything and `record` afterwards.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from workhorse.errors import WorkhorseError
from workhorse.native import Decoding
from workhorse.nn import Decoder

TransformName = Literal[
    "group_heads",
    "quantize",
    "stream_weights",
    "attend_natively",
    "step_natively",
    "compile_steps",
    "capture_steps",
    "train_natively",
    "multiply_in_float8",
    "checkpoint_activations",
    "compile_layers",
]
"""The function that applies it."""

_INFERENCE: tuple[TransformName, ...] = ("quantize", "stream_weights", "attend_natively")
_TRAINING: tuple[TransformName, ...] = (
    "train_natively",
    "multiply_in_float8",
    "checkpoint_activations",
)
MAY_FOLLOW: dict[TransformName, tuple[TransformName, ...]] = {
    "group_heads": ("group_heads",),
    "quantize": ("group_heads", "stream_weights", "attend_natively"),
    "stream_weights": ("group_heads", "quantize", "attend_natively"),
    "attend_natively": ("group_heads", "quantize", "stream_weights"),
    "step_natively": ("group_heads", *_INFERENCE, "compile_steps"),
    "compile_steps": ("group_heads", *_INFERENCE),
    "capture_steps": ("group_heads", *_INFERENCE, "compile_steps"),
    "train_natively": ("group_heads",),
    "multiply_in_float8": ("group_heads", *_TRAINING[:1]),
    "checkpoint_activations": ("group_heads", *_TRAINING[:2]),
    "compile_layers": ("group_heads", *_TRAINING),
}
"""The transforms that a model may carry when each one is applied. After any other it would not find
the modules that it looks for, or would change modules that a program was compiled from."""

_ATTRIBUTE = "transforms"


@dataclass(frozen=True)
class Transform:
    """A transform that a model carries."""

    name: TransformName
    options: dict[str, Any] = field(default_factory=dict)
    """The options that affect what the model computes, or how."""


def transforms_of(root: nn.Module) -> tuple[Transform, ...]:
    """The transforms of a decoder, or of the decoders in a module, in the order of application."""
    carried: list[Transform] = []
    for holder in _holders(root):
        carried += vars(holder).get(_ATTRIBUTE, ())
    return tuple(carried)


def decoding_operators(decoder: Decoder) -> Decoding | None:
    """The native operators that a decoder was prepared with, or None."""
    for carried in transforms_of(decoder):
        if carried.name == "stream_weights":
            return carried.options["operators"].decoding
    return None


def check(root: nn.Module, name: TransformName) -> None:
    """Refuse a transform that a model cannot take after those it carries.

    Raises:
        WorkhorseError: it already carries this one, or one that this cannot follow.
    """
    for carried in transforms_of(root):
        if carried.name in MAY_FOLLOW[name]:
            continue
        if carried.name == name:
            raise WorkhorseError(
                f"the model carries {name} already; apply it once, or load the model anew"
            )
        first = name in MAY_FOLLOW[carried.name]
        remedy = f"apply {name} first" if first else "load the model anew"
        raise WorkhorseError(f"{name} cannot follow {carried.name}; {remedy}")


def record(root: nn.Module, name: TransformName, **options: Any) -> None:
    """Record that a transform was applied to a decoder, or to the decoders in a module."""
    applied = Transform(name, options)
    for holder in _holders(root):
        setattr(holder, _ATTRIBUTE, (*vars(holder).get(_ATTRIBUTE, ()), applied))


def inherit(root: nn.Module, source: nn.Module) -> None:
    """Give a decoder the record of the one that it was made from."""
    for applied in transforms_of(source):
        record(root, applied.name, **applied.options)


def check_weights_kept(root: nn.Module) -> None:
    """Refuse to save weights that a transform replaced irreversibly.

    Raises:
        WorkhorseError: they are quantised, which no file format here supports.
    """
    for carried in transforms_of(root):
        if carried.name == "quantize":
            raise WorkhorseError(
                f"the model is quantised to {carried.options['format']}, which cannot be written; "
                "load the model without quantize"
            )


def _holders(root: nn.Module) -> list[nn.Module]:
    """The decoders in a module, or the module itself if it has none."""
    decoders = [part for part in root.modules() if isinstance(part, Decoder)]
    return [*decoders] or [root]
