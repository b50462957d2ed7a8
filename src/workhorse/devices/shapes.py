"""Shapes of operators' results on tensors without data, worked out once for equal arguments.

PyTorch takes 0.1 to 3 ms to find the shapes of an operator's results, and microseconds to make
tensors of known shapes. The layers of a model make the same calls again and again. Views, whose
shapes are soon found, bypass the rest of `FakeTensorMode`.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch
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
