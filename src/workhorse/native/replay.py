"""Replays calls of operators without Python and autograd; see `bindings/replay.cpp`.

Between two operators Python and autograd take tens of microseconds. In a small model that is as
long as the operators themselves take.
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
    """Why calls cannot be replayed with other inputs, in one line."""


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
    """Sees the operators that are called while it is active, below autograd; keeps no result alive.

    What happens between them may depend on shapes and strides of the inputs, but on no number in
    them. Where Python sees a number, that is refused; what reads some in C++ without an operator is
    not noticed.

    Args:
        inputs: the tensors that others will stand in for.

    Raises:
        Unrecordable: an input is there twice; or, out of the call of an operator or function, that
            depends on numbers in a way that is not an operator's, or returns what is no tensor.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.n_inputs = len(inputs)
        self.constants: dict[int, Tensor] = {}
        """What existed before, such as weights, by slot."""
        self._slots = WeakIdKeyDictionary()
        self._free = count()
        self._refuses_reads = _RefuseReads()
        for tensor in inputs:
            if tensor in self._slots:
                raise Unrecordable("an input is there twice")
            self._new(tensor)

    def __enter__(self) -> Self:
        self._refuses_reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._refuses_reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _depends_on_data(func, args):
            raise Unrecordable(f"{func.name()} depends on numbers")
        schema = func._schema
        given = [
            args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
            for number, one in enumerate(schema.arguments)
        ]
        tensors = [self._slots_in(one) for one in given]
        made = func(*args, **kwargs)
        results = tree_leaves(made)
        if not all(one is None or isinstance(one, Tensor) for one in results):
            if not any(tensors):  # a question about dtypes, as of `promote_types`
                return made
            raise Unrecordable(f"{func.name()} returns what is no tensor")
        arguments = [
            None if slots or one in ([], ()) else _as_any(one)
            for one, slots in zip(given, tensors, strict=True)
        ]
        slots = [self._result(one) for one in results]
        self.calls.append(Call(schema.name, schema.overload_name, arguments, tensors, slots))
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler, a second's work, to keep it from compiling this."""
        return False

    def slot(self, tensor: Tensor | None) -> int:
        """Where a tensor is.

        Raises:
            Unrecordable: it is no input, and no recorded call read or made it.
        """
        if tensor is None:
            return NO_TENSOR
        if tensor not in self._slots:
            raise Unrecordable("no recorded call made a result")
        return self._slots[tensor]

    def _slots_in(self, argument: Any) -> list[int]:
        several = isinstance(argument, list | tuple)
        tensors = argument if several else [argument]
        if all(isinstance(one, Tensor) or (several and one is None) for one in tensors):
            return [NO_TENSOR if one is None else self._read(one) for one in tensors]
        return []

    def _read(self, tensor: Tensor) -> int:
        if tensor not in self._slots:
            self.constants[self._new(tensor)] = tensor
        return self._slots[tensor]

    def _result(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return NO_TENSOR
        return self._slots[tensor] if tensor in self._slots else self._new(tensor)

    def _new(self, tensor: Tensor) -> int:
        self._slots[tensor] = slot = next(self._free)
        return slot


class _RefuseReads(TorchFunctionMode):
    """Refuses what shows numbers to Python, or gives a tensor others, without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", None)
        if name in _READS or func == _SET_DATA:
            raise Unrecordable(f"{name} is no operator")
        return func(*args, **(kwargs or {}))


_READS = frozenset(
    {
        "__array__",
        "__dlpack__",
        "data_ptr",
        "numpy",
        "tensor_split",
        "tolist",
        "untyped_storage",
    }
)
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


def _as_any(argument: Any) -> Any:
    """An argument as PyTorch takes it for the type `Any`."""
    return _MEMORY_FORMATS[argument] if isinstance(argument, torch.memory_format) else argument


_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""As `c10::MemoryFormat` numbers them."""


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator returns a number to Python, or a shape that depends on numbers."""
    if torch.Tag.dynamic_output_shape in func.tags:
        if func.overloadpacket is not torch.ops.aten.index:
            return True
        return any(one is not None and one.dtype in _MASKS for one in args[1])
    return torch.Tag.data_dependent_output in func.tags


_MASKS = (torch.bool, torch.uint8)


class Recording:
    """Recorded calls, to be made again.

    Args:
        program: an empty one of `bindings/replay.cpp`.
        seen: a recorder that is not active any more.
        results: tensors that it saw; None for what is not there.

    Raises:
        Unrecordable: a result was not seen, or an argument cannot be kept.
    """

    def __init__(self, program: Any, seen: Recorder, results: Iterable[Tensor | None]) -> None:
        self._program = program
        self._results = [*map(seen.slot, results)]
        needed = {*self._results, NO_TENSOR}
        dead_after: list[list[int]] = []
        for call in reversed(seen.calls):
            slots = {slot for some in (*call.tensors, call.results) for slot in some}
            dead_after.append(sorted(slots - needed))
            needed |= slots
        for call, dead in zip(seen.calls, reversed(dead_after), strict=True):
            try:
                program.call(*call, dead)
            except RuntimeError as error:
                raise Unrecordable(f"{call.name}: {str(error).splitlines()[0]}") from None

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results for other inputs of the same shapes, strides and dtypes.

        They have no gradient function. Operators that write in place change inputs and constants
        as they did.
        """
        return self._program.run(inputs, self._results)


@dataclass(frozen=True)
class Replay:
    """Makes recordings; an instance exists only where they can be run."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def record(self, seen: Recorder, results: Iterable[Tensor | None]) -> Recording:
        """What was seen, with these results; see `Recording`."""
        constants = seen.constants
        program = torch.classes.workhorse_replay.Program(
            seen.n_inputs, [*constants], [*constants.values()]
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
