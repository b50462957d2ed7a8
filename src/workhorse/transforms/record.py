"""The transforms that a model carries, in the order of application.

A transform changes what the model is; how it is executed is a matter of its bodies
(`workhorse.execute`). A decoder holds its record, so it keeps it when it is copied, wrapped or
saved. Every transform calls `check` before it changes anything and `record` afterwards.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder

TransformName = Literal["group_heads", "quantize"]
"""The function that applies it."""
MAY_FOLLOW: dict[TransformName, tuple[TransformName, ...]] = {
    "group_heads": ("group_heads",),
    "quantize": ("group_heads",),
}
"""The transforms that a model may carry when each one is applied. After any other it would not find
the modules that it looks for."""

_ATTRIBUTE = "transforms"
_BODY = "is_body"
"""Of a decoder that `mark_body` marked."""


@dataclass(frozen=True)
class Transform:
    """A transform that a model carries."""

    name: TransformName
    options: dict[str, Any] = field(default_factory=dict)
    """The options that affect what the model computes."""


def transforms_of(root: nn.Module) -> tuple[Transform, ...]:
    """The transforms of a decoder, or of the decoders in a module, in the order of application."""
    carried: list[Transform] = []
    for holder in _holders(root):
        carried += vars(holder).get(_ATTRIBUTE, ())
    return tuple(carried)


def mark_body(decoder: Decoder) -> None:
    """Note that a decoder is a body of another, to be executed and not to be changed."""
    setattr(decoder, _BODY, True)


def is_body(root: nn.Module) -> bool:
    """Whether a decoder, or one in a module, is a body."""
    return any(vars(holder).get(_BODY, False) for holder in _holders(root))


def check(root: nn.Module, name: TransformName) -> None:
    """Refuse a transform that a model cannot take after those it carries.

    Raises:
        WorkhorseError: it is made to be executed, carries this transform already, or one that this
            cannot follow.
    """
    if is_body(root):
        raise WorkhorseError(
            f"{name} cannot change a decoder that is made ready to run; apply it to the reference, "
            "as load(..., execution='reference') gives it"
        )
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
