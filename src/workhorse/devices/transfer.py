"""Copy named tensors to their destinations, and values from a device to the host."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError


class Destination(Protocol):
    """Destination of a copy: a tensor, or an object with a `copy_` that converts or shards it."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def copy_(self, source: Tensor, /) -> object: ...


class SkippedDestination:
    """Copy destination that ignores its source, for a tensor that only other ranks need."""

    nbytes = 0

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def copy_(self, source: Tensor, /) -> None:
        del source


@torch.no_grad()
def copy_tensors(into: Mapping[str, Destination], source: Mapping[str, Tensor], what: str) -> None:
    """Copy each tensor of a checkpoint to the destination of the same name.

    `what` names the tensors in error messages, such as "optimizer".

    Raises:
        WorkhorseError: names or shapes differ.
    """
    for name in sorted(into.keys() ^ source.keys()):
        where = "the run's config" if name in into else "the checkpoint"
        raise WorkhorseError(
            f"{what}: only {where} has {name!r}: checkpoint and config belong to different runs; "
            "use the checkpoint's config"
        )
    for name, tensor in into.items():
        if tensor.shape != source[name].shape:
            raise WorkhorseError(
                f"{what}: {name!r} is {tuple(source[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the run's config: they belong to different runs; "
                "use the checkpoint's config"
            )
        tensor.copy_(source[name])


class ToHost:
    """An asynchronous copy of a tensor to the host.

    `wait` does not wait for work that the device receives after the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        on_cuda = tensor.device.type == "cuda"
        stream = torch.cuda.current_stream(tensor.device) if on_cuda else None
        self._arrived = stream.record_event() if stream is not None else None

    def wait(self) -> list[Any]:
        """Wait until the copy is complete, and return its values as a list."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
