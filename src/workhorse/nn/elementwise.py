"""Small parts that work on each number by itself."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

Numbers = Float[Tensor, "*shape"]


class Unchanged(nn.Module):
    """An absent part that would have looked at more than its first input."""

    def forward(self, x: Numbers, *_: object) -> Numbers:
        return x


class Multiplier(nn.Module):
    """`x · multiplier`."""

    def __init__(self, multiplier: float) -> None:
        super().__init__()
        self.multiplier = multiplier

    def forward(self, x: Numbers) -> Numbers:
        return x * self.multiplier


class RoundedMultiplier(Multiplier):
    """`x · multiplier`, the multiplier rounded to the type of `x` first."""

    def forward(self, x: Numbers) -> Numbers:
        return x * torch.full((), self.multiplier, dtype=x.dtype, device=x.device)


class Product(nn.Module):
    """`x · y`."""

    def forward(self, x: Float[Tensor, "*batch width"], y: Tensor) -> Float[Tensor, "*batch width"]:
        return x * y


class Clip(nn.Module):
    """Every number held within plus and minus `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Numbers) -> Numbers:
        return x.clamp(-self.limit, self.limit)


class SoftCap(nn.Module):
    """`cap · tanh(x / cap)`: bent smoothly into plus and minus `cap` (Gemma 2, 2408.00118)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Numbers) -> Numbers:
        return self.cap * torch.tanh(x / self.cap)
