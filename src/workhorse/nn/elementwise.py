"""Small elementwise modules."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

Numbers = Float[Tensor, "*shape"]


class Unchanged(nn.Module):
    """Returns its first input: an identity that accepts several inputs."""

    def forward(self, x: Numbers, *_: object) -> Numbers:
        return x


def is_identity(module: nn.Module) -> bool:
    """True if a module returns its first input."""
    return type(module) in (nn.Identity, Unchanged)


class Sum(nn.Module):
    """`x + y` as a module, so that a hook can see the residual stream."""

    def forward(self, x: Numbers, y: Numbers) -> Numbers:
        return x + y


class Multiplier(nn.Module):
    """`x · multiplier`."""

    def __init__(self, multiplier: float) -> None:
        super().__init__()
        self.multiplier = multiplier

    def factor(self, dtype: torch.dtype) -> float:
        """The factor on inputs of a dtype."""
        del dtype
        return self.multiplier

    def forward(self, x: Numbers) -> Numbers:
        return x * self.multiplier


class RoundedMultiplier(Multiplier):
    """`x · multiplier`, with the multiplier first rounded to the dtype of `x`."""

    def factor(self, dtype: torch.dtype) -> float:
        return float(torch.tensor(self.multiplier, dtype=dtype))

    def forward(self, x: Numbers) -> Numbers:
        return x * torch.full((), self.multiplier, dtype=x.dtype, device=x.device)


class Product(nn.Module):
    """`x · y`."""

    def forward(self, x: Float[Tensor, "*batch width"], y: Tensor) -> Float[Tensor, "*batch width"]:
        return x * y


class Clip(nn.Module):
    """`x` clamped to plus or minus `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Numbers) -> Numbers:
        return x.clamp(-self.limit, self.limit)


class SoftCap(nn.Module):
    """`cap · tanh(x / cap)`: a smooth bound of plus and minus `cap` (Gemma 2, 2408.00118)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Numbers) -> Numbers:
        return self.cap * torch.tanh(x / self.cap)
