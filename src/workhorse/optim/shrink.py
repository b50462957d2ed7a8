"""What an update multiplies its gradient by: a number, or a tensor that a device works out.

A tensor lets the device go on without the host: it also says whether the update is made at all.
"""

import torch
from torch import Tensor


def shrink_on_device(loss: Tensor, norm: Tensor, scale: float, grad_clip: float | None) -> Tensor:
    """The factor of the gradient of a scaled loss, (), NaN where the step is not finite.

    Args:
        loss: (), mean of the batch.
        norm: (), of the gradient of the scaled loss.
        scale: of the loss.
        grad_clip: largest norm of the gradient; None for no limit.
    """
    length = norm.double() / scale
    clipped = torch.ones_like(length) if grad_clip is None else (grad_clip / length).clamp(max=1)
    finite = loss.isfinite() & length.isfinite()
    # As wide as gradients, so that one kernel multiplies all of them.
    return torch.where(finite, clipped / scale, torch.nan).float()


def refused(shrink: float | Tensor) -> Tensor | None:
    """Whether a device refuses the update, (); None if the host has decided that it is made."""
    return ~shrink.isfinite() if isinstance(shrink, Tensor) else None


def number(shrink: float | Tensor) -> float:
    """The factor where the host decides."""
    assert not isinstance(shrink, Tensor), "native operators take a number"
    return shrink
