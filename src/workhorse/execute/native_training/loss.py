"""The loss of a head for training on a CPU: its gradient in one pass over a row of logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.native import Training
from workhorse.nn.head import Head
from workhorse.nn.head_loss import WHOLE, HeadLoss, Multiply, Shaping, product
from workhorse.transforms.replace import become, replace_modules


class NativeHeadLoss(HeadLoss):
    """`HeadLoss` whose gemms are those of `multiplies`, with a native operator for the rest."""

    multiplies: Multiply
    operators: Training | None

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiplies(a, b, bias)

    def matrix(self, head: Head) -> Tensor:
        return _Late.apply(head.proj.weight)

    def differentiate(self, logits: Tensor, targets: Tensor, shaping: Shaping) -> Tensor:
        plain = shaping.cap is not None or self.vocabulary is not WHOLE
        if self.operators is None or plain or not logits.is_contiguous():
            return super().differentiate(logits, targets, shaping)
        return self.operators.loss_into_gradient_(
            logits, targets, multiplier=shaping.multiplier, z_loss=shaping.z_loss
        )


class _Late(torch.autograd.Function):
    """The identity, whose gradient is computed after those of everything computed later.

    A table that is tied to the head then gets the sparse gradient of its rows first, and autograd
    adds it to the head's in place. In the other order it would make a third tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        return above[0]


def replace_head_loss(
    root: nn.Module, multiply: Multiply = product, operators: Training | None = None
) -> nn.Module:
    """Let the losses of heads in a module use native operators.

    Args:
        root: the module.
        multiply: the gemm.
        operators: of training; None leaves the rest to PyTorch.

    Returns:
        The module, or its replacement if it is a loss itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is HeadLoss:
            return become(module, NativeHeadLoss, multiplies=multiply, operators=operators)
        return module

    return replace_modules(root, choose)
