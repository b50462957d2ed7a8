"""Copying: into the destinations of named tensors, and numbers from a device to the host."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError


class Destination(Protocol):
    """Where a tensor is copied to: another tensor, or an object that converts it."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def copy_(self, source: Tensor, /) -> object: ...


class Elsewhere:
    """Takes nothing: another process has the tensor.

    Args:
        shape: of the tensor.
    """

    nbytes = 0

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def copy_(self, source: Tensor, /) -> None:
        del source


@torch.no_grad()
def copy_tensors(into: Mapping[str, Destination], source: Mapping[str, Tensor], what: str) -> None:
    """Copy tensor by tensor, by name.

    Raises:
        WorkhorseError: names or shapes differ.
    """
    for name in sorted(into.keys() ^ source.keys()):
        where = "the run's config" if name in into else "the checkpoint"
        raise WorkhorseError(f"{what}: only {where} has {name!r}; they are not of one run")
    for name, tensor in into.items():
        if tensor.shape != source[name].shape:
            raise WorkhorseError(
                f"{what}: {name!r} is {tuple(source[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the run's config; they are not of one run"
            )
        tensor.copy_(source[name])


class ToHost:
    """A copy of a tensor that has begun, and does not wait for what the device does afterwards.

    Args:
        tensor: to copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        on_cuda = tensor.device.type == "cuda"
        stream = torch.cuda.current_stream(tensor.device) if on_cuda else None
        self._arrived = stream.record_event() if stream is not None else None

    def wait(self) -> list[Any]:
        """The numbers, as soon as they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
