"""A dispatch mode that rejects operators for which a GPU would synchronise with the host."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
"""Operators whose result a GPU would have to send to the host."""


class WithoutHost(TorchDispatchMode):
    """Raises an error for operators that need the host, also on a CPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        if name in HOST:
            raise RuntimeError(f"{name} needs the host")
        return func(*args, **(kwargs or {}))
