"""Replace modules of a model by subclasses, and detect hooks and replaced modules.

A transform or a body replaces a module by a module of a subclass with the same parameters,
children and hooks. So parameter names and sharing stay, and `print(model)` shows the new class.

Native operators compute modules without calling them, so PyTorch would not run the modules' hooks.
Their callers must therefore check for hooks, and for parts of a module that were replaced.
"""

# PyTorch has no public API for hooks.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

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
    named: list[tuple[str, nn.Module]] = list(root.named_modules(remove_duplicate=False))
    for name, module in named:
        if module not in chosen:
            chosen[module] = choose(module)
        if name and chosen[module] is not module:
            root.set_submodule(name, chosen[module])
    return cast(Root, chosen[root])


def has_hooks(*parts: nn.Module) -> bool:
    """True if any of these modules has a hook, or if PyTorch has a global module hook.

    Code that computes several modules at once, without calling them, must check this first.
    """
    return bool(modules._has_any_global_hook()) or any(_hooks_of(parts))


class HookWatch:
    """Repeats the check `has_hooks` for the same modules, at low cost.

    The modules are inspected again only if a hook was registered anywhere since the last check.

    Args:
        parts: modules to check.
        from_now: True to ignore hooks that were registered before this object was created.
    """

    def __init__(self, parts: Iterable[nn.Module], *, from_now: bool = False) -> None:
        self._hooks = list(_hooks_of(parts))
        self._ignored = {handle for hooks in self._hooks for handle in hooks} if from_now else set()
        self._unwatched_at = -1

    @property
    def sees_hooks(self) -> bool:
        """True if any of the modules has a hook, or there is a global hook."""
        made = RemovableHandle.next_id  # counts all hooks ever registered, on any module
        if made == self._unwatched_at:
            return False
        if modules._has_any_global_hook() or any(
            hooks.keys() - self._ignored for hooks in self._hooks
        ):
            return True
        self._unwatched_at = made
        return False


class Members:
    """Remembers the submodules, parameters and buffers of a module, to detect replaced ones."""

    def __init__(self, root: nn.Module) -> None:
        every = [
            members
            for module in root.modules()
            for members in (module._modules, module._parameters, module._buffers)
        ]
        self._members = [members for members in every if members]
        self._empty = [members for members in every if not members]
        self._held = list(self._now())

    @property
    def unchanged(self) -> bool:
        """True if the module still has the same submodules, parameters and buffers."""
        same_number = sum(map(len, self._members)) == len(self._held) and not any(self._empty)
        return same_number and all(map(operator.is_, self._now(), self._held))

    def _now(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._members))


def _hooks_of(parts: Iterable[nn.Module]) -> Iterator[Mapping[int, object]]:
    for part in parts:
        yield part._forward_hooks
        yield part._forward_pre_hooks
        yield part._backward_hooks
        yield part._backward_pre_hooks
