"""Numbers on their way from a device to the host."""

from typing import Any

import torch
from torch import Tensor


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
