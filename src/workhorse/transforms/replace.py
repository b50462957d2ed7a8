"""Replacing the modules of a built model: how every transform changes it.

A transform replaces a module of exactly the class that it knows by one of a subclass. The new one
holds the parameters, children and hooks of the old one, so names and sharing stay, and
`print(model)` shows it. No transform assigns a `forward` or sets an attribute from outside.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

Module = TypeVar("Module", bound=nn.Module)
Root = TypeVar("Root", bound=nn.Module)


def become(module: nn.Module, kind: type[Module], **options: Any) -> Module:
    """A module of a subclass with the parameters, children, hooks and options of another.

    Args:
        module: to be replaced; not to be used any more.
        kind: a subclass of its class, whose `__init__` is not run.
        options: further attributes of the new one.
    """
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    for name, value in options.items():
        setattr(made, name, value)
    return made


@functools.cache
def combined(prefix: str, change: type[Module], kind: type[nn.Module]) -> type[Module]:
    """The class that inherits from a mixin and `kind`.

    Its qualified name is its name: PyTorch 2.11 compiles no module of a class where they differ.
    This module has it as an attribute, for PyTorch's compiler; pickle makes it anew.

    Args:
        prefix: of its name, before the name of `kind`.
        change: the mixin, whose methods call `super()`.
        kind: the class to change.
    """
    name = f"{prefix}{kind.__name__}"
    while name in _MADE:  # of a class of the same name from elsewhere
        name += "_"

    def reduce(self: nn.Module) -> tuple[object, ...]:
        return _unmade, (prefix, change, kind), self.__getstate__()

    made = type(name, (change, kind), {"__module__": __name__, "__reduce__": reduce})
    _MADE[name] = made
    return cast(type[Module], made)


_MADE: dict[str, type[nn.Module]] = {}
"""By name, what `combined` made."""


def __getattr__(name: str) -> type[nn.Module]:
    """A combined class, as an attribute of this module."""
    if name in _MADE:
        return _MADE[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _unmade(prefix: str, change: type[Module], kind: type[nn.Module]) -> Module:
    """A module of a combined class, for pickle to fill."""
    made = combined(prefix, change, kind)
    return made.__new__(made)


def replace_modules(root: Root, choose: Callable[[nn.Module], nn.Module]) -> Root:
    """Replace each module of a tree, including the root, by the one chosen for it.

    A module with several names is replaced under all of them.

    Args:
        root: its descendants are replaced in place.
        choose: called once with each module; returns its replacement, or the module to keep it.

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
