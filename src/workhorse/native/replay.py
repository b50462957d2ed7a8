"""Operators called again as they were once, without Python; see `bindings/replay.cpp`.

Between two operators, Python and autograd take tens of microseconds. Where a model is small, that
is as long as the operators themselves take.
"""

# PyTorch has no public types for the schema of an operator, or for classes in C++.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from workhorse.native import build

NO_TENSOR = -1
"""In place of a slot."""


class Unrecordable(Exception):
    """Why calls cannot be made again with other inputs, in one line."""


class Call(NamedTuple):
    """The call of an operator. Its tensors are named by slots."""

    name: str
    overload: str
    arguments: list[Any]
    """None in place of tensors, of lists of them and of empty lists."""
    tensors: list[list[int]]
    """Of each argument."""
    results: list[int]


class Recorder(TorchDispatchMode):
    """Sees the operators that are called while it is active, below autograd; keeps no tensor alive.

    What happens between them must depend on nothing of the inputs but shapes and strides.

    Args:
        inputs: the tensors that others will stand in for.

    Raises:
        Unrecordable: out of the call of an operator, which is not made: it would show Python
            numbers, or sizes that depend on them.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.n_inputs = len(inputs)
        self.kept: dict[int, Tensor] = {}
        """By slot, what no operator made while this was active, such as weights."""
        self._slots = WeakIdKeyDictionary()
        self._free = count()
        self._reads = _NoReading()
        for tensor in inputs:
            self._new(tensor)

    def __enter__(self) -> Self:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if _shows_numbers(func, read):
            raise Unrecordable(f"{func.name()} shows numbers to Python")
        given = [
            args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
            for number, one in enumerate(func._schema.arguments)
        ]
        tensors = [self._slots_of(one) for one in given]
        made = func(*args, **kwargs)
        results = tree_leaves(made)
        if not all(isinstance(one, Tensor) for one in results):
            if not read:  # a question about types
                return made
            raise Unrecordable(f"{func.name()} returns what is no tensor")
        schema = func._schema
        arguments = [
            None if slots or one in ([], ()) else _kept(one)
            for one, slots in zip(given, tensors, strict=True)
        ]
        slots = [self._slots[one] if one in self._slots else self._new(one) for one in results]
        self.calls.append(Call(schema.name, schema.overload_name, arguments, tensors, slots))
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler, a second's work, to keep it from compiling this."""
        return False

    def slot(self, tensor: Tensor | None) -> int:
        """Where a tensor is that was given or made.

        Raises:
            Unrecordable: nothing that was seen has made it.
        """
        if tensor is None:
            return NO_TENSOR
        if tensor not in self._slots:
            raise Unrecordable("something unseen made a result")
        return self._slots[tensor]

    def _slots_of(self, argument: Any) -> list[int]:
        several = isinstance(argument, list | tuple)
        tensors = argument if several else [argument]
        if all(isinstance(one, Tensor) or (several and one is None) for one in tensors):
            return [NO_TENSOR if one is None else self._found(one) for one in tensors]
        return []

    def _found(self, tensor: Tensor) -> int:
        if tensor not in self._slots:
            self.kept[self._new(tensor)] = tensor
        return self._slots[tensor]

    def _new(self, tensor: Tensor) -> int:
        self._slots[tensor] = slot = next(self._free)
        return slot


class _NoReading(TorchFunctionMode):
    """Refuses what shows numbers to Python without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", None) in _READS:
            raise Unrecordable(f"{func.__name__} shows numbers to Python")
        return func(*args, **(kwargs or {}))


_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"})


def _kept(argument: Any) -> Any:
    """As PyTorch takes it where any type may stand."""
    return _MEMORY_FORMATS[argument] if isinstance(argument, torch.memory_format) else argument


_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""As `c10::MemoryFormat` numbers them."""


def _shows_numbers(func: Any, read: Iterable[Tensor]) -> bool:
    """Whether an operator returns a number to Python, or a size that depends on numbers."""
    if torch.Tag.dynamic_output_shape in func.tags:
        if func.overloadpacket is not torch.ops.aten.index:
            return True
        return any(one.dtype in _MASKS for one in read)
    return torch.Tag.data_dependent_output in func.tags


_MASKS = (torch.bool, torch.uint8)


class Recording:
    """What a recorder saw, to be done again.

    Args:
        program: an empty one of `bindings/replay.cpp`.
        seen: a recorder that is not active any more.
        results: tensors that it saw; None for what is not there.

    Raises:
        Unrecordable: a result was not seen, or an argument cannot be kept.
    """

    def __init__(self, program: Any, seen: Recorder, results: Iterable[Tensor | None]) -> None:
        self._program = program
        self._wanted = [*map(seen.slot, results)]
        needed = {*self._wanted, NO_TENSOR}
        over: list[list[int]] = []
        for call in reversed(seen.calls):
            slots = {slot for some in (*call.tensors, call.results) for slot in some}
            over.append(sorted(slots - needed))
            needed |= slots
        for call, last in zip(seen.calls, reversed(over), strict=True):
            try:
                program.call(*call, last)
            except RuntimeError as error:
                raise Unrecordable(f"{call.name}: {str(error).splitlines()[0]}") from None

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results for other inputs of the same shapes, strides and types; without gradients."""
        return self._program.run(inputs, self._wanted)


@dataclass(frozen=True)
class Replay:
    """Makes recordings; an instance exists only where they can be run."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def recording(self, seen: Recorder, results: Iterable[Tensor | None]) -> Recording:
        """What was seen, with these results; see `Recording`."""
        program = torch.classes.workhorse_replay.Recording(
            seen.n_inputs, [*seen.kept], [*seen.kept.values()]
        )
        return Recording(program, seen, results)


def load(*, wait: bool) -> Replay:
    """The library, compiled first if it never was on this machine; see `decoding.load`.

    Raises:
        build.Unavailable: why it cannot be used, in one line.
    """
    return _load(build.ensure("replay", wait=wait))


@functools.cache
def _load(library: Path) -> Replay:
    build.load(library)
    return Replay()
