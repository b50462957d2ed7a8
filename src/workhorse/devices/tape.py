"""Records what a program allocates while it runs on tensors without data.

PyTorch takes 0.1 to 3 ms to find the shapes of an operator's results, and microseconds to make
tensors of known shapes. The layers of a model make the same calls again and again. Views, whose
shapes are soon found, bypass the rest of `FakeTensorMode`.

PyTorch's fake tensors, and those of its device `meta`, have shapes and storages but no memory, and
every operator, ours included, can run on them. So a program can run here at any size, and what is
recorded is what it does: no formula is involved. What operators need inside themselves is not seen.
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
    """Of a tensor without data that has a storage of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Results(NamedTuple):
    leaves: list[Any]
    """`_TensorMeta` of tensors, and what is no tensor: sizes, None."""
    structure: TreeSpec


class ShapeCache:
    """Calls operators, and remembers the shapes that their results had.

    Args:
        fake: the mode whose tensors the operators take; None for those of the device `meta`.
    """

    def __init__(self, fake: FakeTensorMode | None) -> None:
        self._fake = fake
        self._known: dict[Hashable, _Results | None] = {}
        """None: the call gives more than new tensors."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns, or new tensors like those that it did return."""
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
    """Whether an operator says that it changes nothing and returns no part of what it is given."""
    schema = func._schema
    named = [*schema.arguments, *schema.returns]
    return not schema.is_mutable and all(one.alias_info is None for one in named)


def _is_view(func: Any) -> bool:
    return func.is_view or func is torch.ops.aten._unsafe_view.default  # which does not say so


def _described(value: Any) -> Hashable:
    """What decides the shapes of an operator's results.

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
    """Results whose tensors have a storage each, as long as they need; None of others."""
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
    """A storage.

    Attributes:
        n_bytes: its size.
        born: the number of operators that had run when it was allocated.
        died: the same when it was freed; None while it lives.
        kind: what it is for, which whoever uses the tape finds out.
        part: what was running, see `Tape.part`.
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
        part: of the program that is running; whoever uses the tape sets it.
        allocations: all that were made.
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
        """Those not freed yet."""
        return self._alive.values()

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what the storages of tensors are for."""
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
    """Whether this thread is in `without_data`: what it computes is seen, and never used."""
    if torch.compiler.is_compiling():  # which never happens there, and cannot look at the modes
        return False
    return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())


def stand_in(device: torch.device) -> torch.device:
    """The device on which a program runs without data to show what it does on another.

    Fake tensors say that they are on a CPU, as native operators want it; all other devices have
    PyTorch's own operators, as `meta` has.
    """
    return CPU if device.type == "cpu" else torch.device("meta")


@contextmanager
def without_data(device: torch.device = CPU) -> Generator[Tape]:
    """A context in which tensors have no data, and the record of what is allocated in it.

    Args:
        device: that the program makes tensors on, a `stand_in`.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True) if device == CPU else None
    with fake or nullcontext(), Tape(ShapeCache(fake)) as tape, _without_log():
        yield tape


@contextmanager
def _without_log() -> Generator[None]:
    """Keep PyTorch from printing the traceback of an error that is raised as well."""
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
    """For a tensor without data that is copied to the CPU: ones."""
    target = options.get("device")
    if tensor.device.type != "meta" or target is None or torch.device(target).type == "meta":
        return NotImplemented
    return torch.ones(tensor.shape, dtype=options.get("dtype") or tensor.dtype)


def _device(tensor: Tensor) -> Any:
    """The device of a fake tensor, without the detour through `FakeTensorMode`."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else NotImplemented


def _number(tensor: Tensor) -> float | int:
    """For code that branches on a value: one, as for a finite loss or a row that exists."""
    return 1.0 if tensor.is_floating_point() else 1


def _all_different(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """For the distinct values of a tensor: as many as there can be."""
    flat = x.numel()
    return x.new_empty(flat), x.new_empty(x.shape), x.new_empty(flat)


def _of_different_ids(ids: Tensor, rows: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """For the sums of rows of distinct ids: as many as there can be."""
    return torch.empty_like(ids), torch.empty_like(rows)


def _added_in_place(dense: Any, other: Any, *_: Any, **__: Any) -> Any:
    """For a dense gradient and a sparse one, which autograd adds to it in place."""
    sparse = isinstance(other, Tensor) and other.layout != torch.strided
    return dense if sparse else NotImplemented


def _split(x: Tensor, sizes: list[int], dim: int = 0) -> Any:
    """For parts whose sizes come from a tensor, as the rows of each expert: equal ones."""
    if sum(sizes) == x.shape[dim]:
        return NotImplemented
    even, rest = divmod(x.shape[dim], len(sizes))
    return aten.split_with_sizes(x, [even + (part < rest) for part in range(len(sizes))], dim)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """For PyTorch's grouped gemm, whose fake kernel takes bfloat16 alone."""
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
"""By name, operators that depend on values, or have no fake kernel or a slow one, and what runs in
their place."""
