"""Other modules in a built model's places: how every transform changes it.

A transform puts a module of a subclass where there was one of exactly the class that it knows. The
new one holds what the old one held, so that names, sharing and hooks stay, and `print(model)` shows
it. Nobody assigns a `forward` or sets an attribute from outside.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)
Root = TypeVar("Root", bound=nn.Module)


def become(module: nn.Module, kind: type[Kind], **options: Any) -> Kind:
    """A module of a subclass with the parameters, children, hooks and options of another.

    Args:
        module: what it takes the place of; not to be used any more.
        kind: a subclass of its class, whose `__init__` is not run.
        options: attributes of the new one beside.
    """
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    for name, value in options.items():
        setattr(made, name, value)
    return made


@functools.cache
def combined(prefix: str, change: type[Kind], kind: type[nn.Module]) -> type[Kind]:
    """The class that is `kind` with a change before it, by the name of both.

    Args:
        prefix: before the name of `kind`.
        change: a class whose methods call `super()`.
        kind: what is changed.
    """
    return cast(type[Kind], type(f"{prefix}{kind.__name__}", (change, kind), {}))


def replace_modules(root: Root, choose: Callable[[nn.Module], nn.Module]) -> Root:
    """Put what is chosen for it in each module's place, the root's included.

    A module that stands at several places is replaced by one that stands at all of them.

    Args:
        root: changed in place, but for itself.
        choose: given each module once, what shall stand in its place; itself to leave it.

    Returns:
        What was chosen for the root.
    """
    chosen: dict[nn.Module, nn.Module] = {}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if module not in chosen:
            chosen[module] = choose(module)
        if name and chosen[module] is not module:
            root.set_submodule(name, chosen[module])
    return cast(Root, chosen[root])
