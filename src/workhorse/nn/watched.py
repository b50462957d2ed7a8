"""Detection of hooks on modules and of replaced submodules, parameters and buffers.

Native operators compute modules without calling them, so PyTorch would not run the modules' hooks.
Their callers must therefore check for hooks, and for parts of a module that were replaced.
"""

# PyTorch has no public API for this.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle


def watched(*parts: nn.Module) -> bool:
    """True if any of these modules has a hook, or if PyTorch has a global module hook.

    Code that computes several modules at once, without calling them, must check this first.
    """
    return bool(modules._has_any_global_hook()) or any(_hooks_of(parts))


class Watch:
    """Repeats the check `watched` for the same modules, at low cost.

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


class Held:
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
