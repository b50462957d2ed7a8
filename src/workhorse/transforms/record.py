"""Record the transforms that were applied to a model.

A transform, such as quantisation, changes the results of a model. In contrast, a body
(`workhorse.execute`) is a copy of a model that only executes it differently. A decoder stores the
list of its transforms, and keeps it when it is copied, wrapped or saved. `group_heads` and
`quantize` call `check` before they change a model, and `record` afterwards.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from workhorse.errors import WorkhorseError
from workhorse.nn.decoder import Decoder, decoders_in

TransformName = Literal["group_heads", "quantize", "adapt"]
"""Name of a transform."""
MAY_FOLLOW: dict[TransformName, tuple[TransformName, ...]] = {
    "group_heads": ("group_heads",),
    "quantize": ("group_heads",),
    "adapt": ("group_heads", "quantize", "adapt"),
}
"""For each transform, the transforms that may already have been applied to the model. After any
other transform, it would not find the modules that it replaces."""

_ATTRIBUTE = "transforms"
_BODY = "is_body"
"""Name of the attribute that `mark_body` sets."""
_SHARES = "shares_weights"
"""Name of the attribute that `mark_sharing` sets."""


@dataclass(frozen=True)
class Transform:
    """A transform that was applied to a model."""

    name: TransformName
    options: dict[str, Any] = field(default_factory=dict)
    """The options that affect the results of the model."""


def transforms_of(root: nn.Module) -> tuple[Transform, ...]:
    """The transforms that were applied to a module, or to the decoders in it, in order."""
    carried: list[Transform] = []
    for holder in _holders(root):
        carried += vars(holder).get(_ATTRIBUTE, ())
    return tuple(carried)


def mark_body(decoder: Decoder) -> None:
    """Mark a decoder as a body: a copy for execution, to which no transform may be applied."""
    setattr(decoder, _BODY, True)


def is_body(root: nn.Module) -> bool:
    """True if a module is, or contains, a decoder that `mark_body` marked."""
    return any(vars(holder).get(_BODY, False) for holder in _holders(root))


def mark_sharing(decoder: Decoder) -> None:
    """Mark a decoder as one of several with the same weights, which no transform may change."""
    setattr(decoder, _SHARES, True)


def shares_weights(decoder: Decoder) -> bool:
    """True if `mark_sharing` marked a decoder."""
    return vars(decoder).get(_SHARES, False)


def check(root: nn.Module, name: TransformName) -> None:
    """Check that the transform `name` can be applied to a model.

    Raises:
        WorkhorseError: the model is a body (see `mark_body`), or has a transform that is not in
            `MAY_FOLLOW`.
    """
    if is_body(root):
        raise WorkhorseError(
            f"{name} cannot change a decoder that is prepared for execution; apply it to the "
            "reference, which load(..., execution='reference') returns"
        )
    for carried in transforms_of(root):
        if carried.name in MAY_FOLLOW[name]:
            continue
        if carried.name == name:
            raise WorkhorseError(f"{name} was already applied to the model; load the model again")
        first = name in MAY_FOLLOW[carried.name]
        remedy = f"apply {name} first" if first else "load the model again"
        raise WorkhorseError(f"{name} cannot be applied after {carried.name}; {remedy}")


def record(root: nn.Module, name: TransformName, **options: Any) -> None:
    """Record a transform of a module: in each decoder inside it, or in itself if there is none."""
    applied = Transform(name, options)
    for holder in _holders(root):
        setattr(holder, _ATTRIBUTE, (*vars(holder).get(_ATTRIBUTE, ()), applied))


def inherit(root: nn.Module, source: nn.Module) -> None:
    """Copy the record of transforms from `source` to `root`, a decoder that was made from it."""
    for applied in transforms_of(source):
        record(root, applied.name, **applied.options)


def check_weights_kept(root: nn.Module) -> None:
    """Check that a model's weights are those of its config, before they are saved.

    Raises:
        WorkhorseError: the weights are quantised, or the model has an adapter: no file format here
            supports this.
    """
    for carried in transforms_of(root):
        if carried.name == "quantize":
            raise WorkhorseError(
                f"the model is quantised to {carried.options['format']}, which cannot be written; "
                "load the model without quantize"
            )
        if carried.name == "adapt":
            raise WorkhorseError(
                f"the model has the adapter {carried.options['adapter']}, which cannot be written "
                "with its base; merge it first, with workhorse convert or with Model.merged()"
            )


def _holders(root: nn.Module) -> list[nn.Module]:
    """The decoders in a module, or the module itself if it has none."""
    return [*decoders_in(root)] or [root]
