"""PyTorch's autocast, as modules ask for it; on `meta`, where there is none, it is off."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes in on a tensor's device; None: it is off."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on a tensor's device."""
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
