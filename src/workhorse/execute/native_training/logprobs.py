"""Log-probabilities for training on a CPU: terms and gradient in one pass over a row of logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.native import Training
from workhorse.nn.head import Head
from workhorse.nn.logprobs import WHOLE, HeadLoss, Shaping, TokenLogprobs
from workhorse.nn.products import Multiply, product
from workhorse.transforms.replace import become, combined, replace_modules


class NativeLogprobs(TokenLogprobs):
    """`TokenLogprobs` with the gemms of `multiplies` and a native operator for the rest."""

    multiplies: Multiply
    operators: Training | None

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiplies(a, b, bias)

    def matrix(self, head: Head) -> Tensor:
        return _Late.apply(head.proj.weight)

    def score(
        self, logits: Tensor, targets: Tensor, coefficients: Tensor | None, shaping: Shaping
    ) -> Tensor:
        plain = shaping.cap is not None or self.vocabulary is not WHOLE
        if self.operators is None or plain or not logits.is_contiguous():
            return super().score(logits, targets, coefficients, shaping)
        return self.operators.score_(
            logits, targets, coefficients, multiplier=shaping.multiplier, entropy=self.entropy
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


def replace_logprobs(
    root: nn.Module, multiply: Multiply = product, operators: Training | None = None
) -> nn.Module:
    """Let the log-probabilities of heads in a module use native operators.

    Args:
        root: the module.
        multiply: the gemm.
        operators: of training; None leaves the rest to PyTorch.

    Returns:
        The module, or its replacement if it is of them itself.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) not in (HeadLoss, TokenLogprobs):
            return module
        kind = combined("Native", NativeLogprobs, type(module))
        return become(module, kind, multiplies=multiply, operators=operators)

    return replace_modules(root, choose)
