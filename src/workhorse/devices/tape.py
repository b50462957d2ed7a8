"""Record the memory that code would allocate, by running it on tensors without data.

PyTorch's fake tensors, and tensors of its device `meta`, have shapes and storages but no memory.
All operators, including the native ones, can run on them. So code with tensors of any size can run
on this machine, and its allocations are recorded instead of estimated. Memory that operators
allocate internally is not recorded.

PyTorch takes 0.1 to 3 ms to compute the shapes of an operator's results, but only microseconds to
make tensors of known shapes. The layers of a model repeat the same calls, so the shapes are cached.
Views are not cached, but called directly, without the slow parts of `FakeTensorMode`.
"""

import logging
from collections.abc import Callable, Generator, Hashable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten


class _TensorMeta(NamedTuple):
    """Shape, strides, dtype and device of a tensor without data that has its own storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Results(NamedTuple):
    leaves: list[Any]
    """The flattened results of a call, with a `_TensorMeta` in place of each tensor."""
    structure: TreeSpec


class ShapeCache:
    """Calls operators on tensors without data, and caches the shapes of their results.

    Args:
        fake: the mode of the fake tensors; None for tensors of the device `meta`.
    """

    def __init__(self, fake: FakeTensorMode | None) -> None:
        self._fake = fake
        self._known: dict[Hashable, _Results | None] = {}
        """Results by call; None if a call is not cached because a result shares its storage."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)`, without calling it if the result shapes are cached."""
        if self._fake is not None and _is_view(func) and isinstance(args[0], FakeTensor):
            with in_kernel_invocation_manager(self._fake):
                made = func(*args, **kwargs)
            device = args[0].fake_device
            return tree_map(lambda view: FakeTensor(self._fake, view, device), made)
        if not _is_pure(func):
            return func(*args, **kwargs)
        try:
            call = func, torch.get_default_dtype(), _described(args), _described(kwargs)
            known = self._known.get(call)
        except TypeError:  # a tensor that has data, or something that cannot be compared
            return func(*args, **kwargs)
        if known is not None:
            return tree_unflatten(map(self._made, known.leaves), known.structure)
        made = func(*args, **kwargs)
        if call not in self._known:
            self._known[call] = _new(made, [args, kwargs])
        return made

    def _made(self, leaf: Any) -> Any:
        if not isinstance(leaf, _TensorMeta):
            return leaf
        size, stride, dtype, device = leaf
        if self._fake is None:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        with no_dispatch():
            elements = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(self._fake, elements, device)


@cache
def _is_pure(func: Any) -> bool:
    """True if an operator, by its schema, does not modify arguments or return aliases of them."""
    schema = func._schema
    named = [*schema.arguments, *schema.returns]
    return not schema.is_mutable and all(one.alias_info is None for one in named)


def _is_view(func: Any) -> bool:
    return func.is_view or func is torch.ops.aten._unsafe_view.default  # its schema hides the view


def _described(value: Any) -> Hashable:
    """Return a hashable key for an argument that determines its effect on result shapes.

    Raises:
        TypeError: the value is a tensor with data, or cannot be hashed.
    """
    if isinstance(value, Tensor):
        return _meta_of(value)
    if isinstance(value, list | tuple):
        return tuple(_described(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _described(one)) for name, one in value.items())
    return type(value), value  # 1, 1.0 and True are equal


def _meta_of(tensor: Tensor) -> _TensorMeta:
    if isinstance(tensor, FakeTensor):
        device, has_data = tensor.fake_device, tensor.constant is not None
    else:
        device, has_data = tensor.device, not tensor.is_meta
    if has_data or tensor.layout != torch.strided:
        raise TypeError("has data, or is sparse")
    return _TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)


def _new(made: Any, given: list[Any]) -> _Results | None:
    """Return the results of a call without their tensors, for the cache.

    Return None if a result tensor shares its storage, or uses only a part of it.
    """
    results, structure = tree_flatten(made)
    tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    storages = {one.untyped_storage()._cdata for one in tensors if one.layout == torch.strided}
    leaves = []
    for result in results:
        if not isinstance(result, Tensor):
            leaves.append(result)
            continue
        try:
            leaves.append(_meta_of(result))
        except TypeError:
            return None
        storage = result.untyped_storage()
        last = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
        needed = (last + 1) * result.element_size() if result.numel() else 0
        if storage._cdata in storages or storage.nbytes() != needed or result.storage_offset():
            return None
        storages.add(storage._cdata)
    return _Results(leaves, structure)


aten = torch.ops.aten
CPU = torch.device("cpu")


@dataclass(eq=False)
class Allocation:
    """A storage that was allocated while a `Tape` was active.

    Attributes:
        n_bytes: size of the storage in bytes.
        born: the number of operators that had run when it was allocated.
        died: the number of operators that had run when it was freed; None if it was not freed.
        kind: purpose of the storage, such as "gradients"; set by `Tape.mark`.
        part: name of the part of the program that allocated it (`Tape.part`).
    """

    n_bytes: int
    born: int
    part: str
    kind: str = ""
    died: int | None = None


class Tape(TorchDispatchMode):
    """Records every storage that is allocated while it is active; see `without_data`.

    Attributes:
        now: the number of operators that have run.
        part: name of the part of the program that is running; the caller sets it.
        allocations: all allocations so far, including freed ones.
    """

    def __init__(self, shapes: ShapeCache) -> None:
        super().__init__()
        self.now = 0
        self.part = ""
        self.allocations: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._shapes = shapes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.now += 1
        kwargs = kwargs or {}
        instead = _INSTEAD.get(func.name())
        made = NotImplemented if instead is None else instead(*args, **kwargs)
        if made is NotImplemented:
            made = self._shapes.call(func, args, kwargs)
        for tensor in _dense(tree_leaves(made)):
            self._see(tensor)
        return made

    @property
    def alive(self) -> Iterable[Allocation]:
        """The allocations that have not been freed yet."""
        return self._alive.values()

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set `Allocation.kind` for the storages of these tensors."""
        for tensor in tensors:
            dense = tensor if tensor.layout == torch.strided else tensor._values()
            allocation = self._alive.get(dense.untyped_storage()._cdata)
            if allocation is not None:
                allocation.kind = kind

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            allocation = Allocation(storage.nbytes(), self.now, self.part)
            self.allocations.append(allocation)
            self._alive[key] = allocation
            finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._alive.pop(key).died = self.now


def recording() -> bool:
    """True if this thread is inside `without_data`, where tensors have no values."""
    if torch.compiler.is_compiling():  # never in `without_data`; compiled code cannot see the modes
        return False
    return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())


def stand_in(device: torch.device) -> torch.device:
    """Return the device to use inside `without_data` for code that would run on `device`.

    For a CPU it is the CPU, since native operators require tensors on a CPU; fake tensors report
    this device. For all other devices it is `meta`, on which PyTorch's own operators run.
    """
    return CPU if device.type == "cpu" else torch.device("meta")


@contextmanager
def without_data(device: torch.device = CPU) -> Generator[Tape]:
    """Context manager in which tensors have no data; yields the record of allocations.

    Args:
        device: the device on which the code creates tensors, as returned by `stand_in`.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True) if device == CPU else None
    with fake or nullcontext(), Tape(ShapeCache(fake)) as tape, _without_log():
        yield tape


@contextmanager
def _without_log() -> Generator[None]:
    """Context manager that stops PyTorch from logging tracebacks of errors that it also raises."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _dense(values: Iterable[Any]) -> Iterable[Tensor]:
    return (
        value for value in values if isinstance(value, Tensor) and value.layout == torch.strided
    )


def _read(tensor: Tensor, **options: Any) -> Any:
    """Replaces the copy of a meta tensor to another device: returns ones."""
    target = options.get("device")
    if tensor.device.type != "meta" or target is None or torch.device(target).type == "meta":
        return NotImplemented
    return torch.ones(tensor.shape, dtype=options.get("dtype") or tensor.dtype)


def _device(tensor: Tensor) -> Any:
    """Replaces reading the device of a fake tensor: returns it faster than `FakeTensorMode`."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else NotImplemented


def _number(tensor: Tensor) -> float | int:
    """Replaces reading a tensor's value (`item`): returns 1, so that a loss looks finite."""
    return 1.0 if tensor.is_floating_point() else 1


def _all_different(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `unique`: returns results of the maximum size, as if all values were distinct."""
    flat = x.numel()
    return x.new_empty(flat), x.new_empty(x.shape), x.new_empty(flat)


def _of_different_ids(ids: Tensor, rows: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Replaces `Training.sum_rows`: returns results of the maximum size, for distinct ids."""
    return torch.empty_like(ids), torch.empty_like(rows)


def _added_in_place(dense: Any, other: Any, *_: Any, **__: Any) -> Any:
    """Replaces the addition of a sparse gradient to a dense one: returns the dense one."""
    sparse = isinstance(other, Tensor) and other.layout != torch.strided
    return dense if sparse else NotImplemented


def _split(x: Tensor, sizes: list[int], dim: int = 0) -> Any:
    """Replaces a split with sizes from a tensor, such as tokens per expert: splits evenly."""
    if sum(sizes) == x.shape[dim]:
        return NotImplemented
    even, rest = divmod(x.shape[dim], len(sizes))
    return aten.split_with_sizes(x, [even + (part < rest) for part in range(len(sizes))], dim)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replaces the grouped matmul, since PyTorch's fake kernel accepts only bfloat16."""
    groups = [len(ends)] if a.ndim == b.ndim == 2 else []  # noqa: PLR2004
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


_INSTEAD: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _number,
    "aten::_to_copy": _read,
    "aten::_unique2": _all_different,
    "aten::add.Tensor": _added_in_place,
    "aten::add_.Tensor": _added_in_place,
    "aten::split_with_sizes": _split,
    "aten::_grouped_mm": _grouped_mm,
    "prim::device": _device,
    "workhorse::sum_rows": _of_different_ids,
}
"""Replacements of operators that depend on tensor values or lack a fast fake kernel, by name. If a
replacement returns NotImplemented, the operator is called."""
