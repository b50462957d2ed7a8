"""The loss of a head and its gradient on a CPU, in one pass over a row of logits."""

from torch import Tensor

from workhorse.native import training
from workhorse.nn.head_loss import Shaping, loss_into_gradient


def differentiate_loss(logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
    """As `loss_into_gradient`; where the operator cannot, by it."""
    if shaping.cap is not None or not logits.is_contiguous():
        return loss_into_gradient(logits, targets, shaping)
    return training.loss_into_gradient_(
        logits, targets, multiplier=shaping.multiplier, z_loss=shaping.z_loss
    )
