"""The loss of a step, compiled by PyTorch: two passes over the logits and no float32 copy of them.

With `loss_into_gradient` a GPU reads and writes logits a dozen times, most of them in float32.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from workhorse.nn.head_loss import (
    WHOLE,
    HeadLoss,
    Shaping,
    shape_logits,
    unshape_gradient,
)
from workhorse.nn.loss import IGNORE
from workhorse.transforms.replace import become, replace_modules

LossIntoGradient = Callable[[Tensor, Tensor, Shaping], Tensor]


def compile_loss(objective: nn.Module) -> None:
    """Compile the loss of an objective, in place; native ones and those of divided layers stay."""

    def choose(module: nn.Module) -> nn.Module:
        return become(module, CompiledHeadLoss) if type(module) is HeadLoss else module

    replace_modules(objective, choose)


class CompiledHeadLoss(HeadLoss):
    """A `HeadLoss` whose loss and gradient are one compiled function of the logits."""

    def differentiate(self, logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
        for rows in (logits, targets):  # the last part has fewer; one row has its own program
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        return _compiled()(logits, targets, shaping)


@cache
def _compiled() -> LossIntoGradient:
    return torch.compile(fused_loss_into_gradient)


def fused_loss_into_gradient(logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
    """`loss_into_gradient` in operators of which a compiler makes passes over whole rows."""
    counted = (targets != IGNORE)[:, None]
    _, expected = WHOLE.places(targets)
    shaped = shape_logits(logits, shaping)
    largest = shaped.amax(dim=1, keepdim=True)
    powers = (shaped - largest).exp()
    sums = powers.sum(dim=1, keepdim=True)
    normaliser = sums.log() + largest
    losses = torch.cat(
        (normaliser - shaped.gather(1, expected), shaping.z_loss * normaliser.square()), dim=1
    )
    total = (losses * counted).sum(dim=0)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = powers * ((1 + 2 * shaping.z_loss * normaliser) / sums)
    gradient = (gradient - (columns == expected).to(gradient.dtype)) * counted
    unshape_gradient(gradient, shaped, shaping)
    logits.copy_(gradient)
    return total
