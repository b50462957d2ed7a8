"""Record the transforms that were applied to a model, and replace modules in a transform.

A transform, such as quantisation, changes the results of a model. In contrast, a body
(`workhorse.execute`) is a copy of a model that only executes it differently. A decoder stores the
list of its transforms, and keeps it when it is copied, wrapped or saved. `group_heads` and
`quantize` call `check` before they change a model, and `record` afterwards.

To change a module, a transform replaces it by a module of a subclass with the same parameters,
children and hooks. So parameter names and sharing stay, and `print(model)` shows the new class.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from torch import nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder

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
    decoders = [part for part in root.modules() if isinstance(part, Decoder)]
    return [*decoders] or [root]


Module = TypeVar("Module", bound=nn.Module)
Root = TypeVar("Root", bound=nn.Module)


def as_subclass(module: nn.Module, kind: type[Module], **options: Any) -> Module:
    """Create a module of a subclass, with the parameters, children and hooks of a given module.

    Args:
        module: the module to replace. Do not use it afterwards: the new module shares its state.
        kind: a subclass of the module's class. Its `__init__` is not called.
        options: additional attributes of the new module.
    """
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    for name, value in options.items():
        setattr(made, name, value)
    return made


@functools.cache
def mixin_class(prefix: str, change: type[Module], kind: type[nn.Module]) -> type[Module]:
    """Create the class that inherits from a mixin and `kind`.

    The new class has equal `__name__` and `__qualname__` and is an attribute of this Python module,
    because PyTorch 2.11 cannot compile its modules otherwise. Unpickling creates the class again.

    Args:
        prefix: the beginning of the new class's name, before the name of `kind`.
        change: the mixin, whose methods call `super()`.
        kind: the class to change.
    """
    name = f"{prefix}{kind.__name__}"
    while name in _MADE:  # taken by a class of the same name from another module
        name += "_"

    def reduce(self: nn.Module) -> tuple[object, ...]:
        return _unmade, (prefix, change, kind), self.__getstate__()

    made = type(name, (change, kind), {"__module__": __name__, "__reduce__": reduce})
    _MADE[name] = made
    return cast(type[Module], made)


_MADE: dict[str, type[nn.Module]] = {}
"""Classes that `mixin_class` created, by name."""


def __getattr__(name: str) -> type[nn.Module]:
    """Find a class that `mixin_class` created, as an attribute of this Python module."""
    if name in _MADE:
        return _MADE[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _unmade(prefix: str, change: type[Module], kind: type[nn.Module]) -> Module:
    """Create an empty module of the class that `mixin_class` returns; unpickling sets its state."""
    made = mixin_class(prefix, change, kind)
    return made.__new__(made)


def replace_modules(root: Root, choose: Callable[[nn.Module], nn.Module]) -> Root:
    """Replace each module of a tree, including the root, by the one chosen for it.

    A module with several names is replaced under all its names.

    Args:
        root: root of the tree. Its descendants are replaced in place.
        choose: called once with each module; returns the replacement, or the same module to keep
            it.

    Returns:
        The replacement of the root.
    """
    chosen: dict[nn.Module, nn.Module] = {}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if module not in chosen:
            chosen[module] = choose(module)
        if name and chosen[module] is not module:
            root.set_submodule(name, chosen[module])
    return cast(Root, chosen[root])
