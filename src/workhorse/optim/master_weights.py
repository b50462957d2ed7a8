"""Weights in bfloat16 whose exact float32 values the optimizer keeps: mixed precision, no casts.

Autocast keeps float32 weights and casts them, and their gradients, at every use. Here weights,
activations and gradients are bfloat16 and nothing is cast; an update works on the float32 values
(1710.03740 §3.1). A float32 number is its rounding to bfloat16 and sixteen bits more, so the exact
values take no memory beyond those bits:

    bits of the master = bits of the weight · 2^16 + remainder, -2^15 <= remainder < 2^15
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PIECE = 2**18
"""Numbers that are updated at once on a CPU: what is in between stays in the cache."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as its rounding to bfloat16 (half away from zero) and an int16 remainder."""
    bits = master.view(torch.int32)
    upper = (bits + 2**15) >> 16
    remainder = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The float32 tensor that `split` took apart, bit for bit."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Tensors of one shape in flat pieces that fit a cache; whole on other devices than a CPU."""
    first = tensors[0]
    size = PIECE if first.device.type == "cpu" else max(first.numel(), 1)
    return zip(*(tensor.detach().view(-1).split(size) for tensor in tensors), strict=True)


class Masters:
    """Float32 values and float32 gradients of parameters, whatever type these have.

    A parameter that was not narrowed is its own master, and nothing here costs anything.

    Args:
        narrowed: what is rounded to bfloat16 from now on; None for nothing. A parameter that takes
            no gradient stays as it is: a router's bias moves in steps that bfloat16 cannot hold.
        native: whether updates on the CPU are the native operators of training.
    """

    def __init__(self, narrowed: nn.Module | None = None, *, native: bool = False) -> None:
        self.native = native
        self.remainders: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[nn.Parameter, Tensor] = {}
        for parameter in () if narrowed is None else narrowed.parameters():
            if parameter.requires_grad and parameter.dtype == torch.float32:
                parameter.data, self.remainders[parameter] = split(parameter.data)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Every weight of a module once, in float32, by the first of its names."""
        return {name: self.read(weight) for name, weight in module.named_parameters()}

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's float32 values: a copy, or the parameter itself where it is its master."""
        if parameter not in self.remainders:
            return parameter.detach()
        return join(parameter.detach(), self.remainders[parameter])

    def write(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set what `read` gave and an update changed; nothing is left to do for a master itself."""
        if parameter in self.remainders:
            rounded, remainder = split(values)
            parameter.detach().copy_(rounded)
            self.remainders[parameter].copy_(remainder)

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add a micro-batch's gradients to float32 sums; many small ones would vanish."""
        for parameter in parameters:
            if parameter in self.remainders and parameter.grad is not None:
                if parameter in self.sums:
                    self.sums[parameter].add_(parameter.grad)
                else:
                    self.sums[parameter] = parameter.grad.float()
                parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of the whole batch, in float32 where it was gathered."""
        return self.sums.get(parameter, parameter.grad)
