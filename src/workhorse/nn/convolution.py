"""Short convolutions: each feature of a sub-layer's input is mixed with its last few values."""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from workhorse.config.base import Config, ConfigError
from workhorse.nn.cache.view import CacheEntry
from workhorse.nn.context import Context, context_alone
from workhorse.nn.shapes import Hidden

SubLayer = Literal["attention", "feed_forward"]


class ShortConvolutionConfig(Config):
    """`x[t] + Σ weight[i] · x[t - i]` over `width` tokens, for each feature separately.

    A layer then sees the last few tokens without using attention for them. The weights start at 0.
    Papers: Canon layers (Physics of Language Models 4.1, 2512.17351), which use this residual form;
    Primer, 2109.08668 §4.
    """

    width: int = Field(default=4, ge=2, le=256)
    """Number of tokens that are combined, including the current one. The time of the convolution
    grows in proportion to it."""
    before: tuple[SubLayer, ...] = Field(default=("attention", "feed_forward"), min_length=1)
    """The sub-layers that get a convolution on their input, after the norm."""

    def model_post_init(self, _context: object) -> None:
        if len(set(self.before)) < len(self.before):
            raise ConfigError("names a sub-layer twice; remove one", "before")

    def build(self, d_model: int) -> "ShortConvolution":
        return ShortConvolution(d_model, self.width)


class ShortConvolution(nn.Module):
    """`x[t] + Σ weight[i] · x[t - i]` for i from 0 to `width - 1`, within each sequence.

    Args:
        d_model: width of the input.
        width: number of tokens that are combined, including the current one.
    """

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        context = context or context_alone(x, self.d_model, cache)
        return context.by_part(self.mix, x, cache=cache)

    def mix(self, x: Hidden, context: Context, cache: CacheEntry | None) -> Hidden:
        """Convolve each row, including earlier tokens that are in the cache."""
        past = _past(x, self.width, context) if cache is None else _stored(x, context, cache, self)
        y = x + self.weight[0] * x
        for weight, earlier in zip(self.weight[1:], past, strict=True):
            y = y + weight * earlier
        return y

    def extra_repr(self) -> str:
        return f"{self.d_model}, width={self.width}"


def _past(x: Hidden, width: int, context: Context) -> list[Hidden]:
    """The inputs 1, 2 … `width - 1` tokens before each token; 0 before the start of a sequence."""
    shifted = [F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(1, width)]
    if context.uniform:
        return shifted
    exists = [(context.positions >= back)[..., None] for back in range(1, width)]
    return [earlier * mask for earlier, mask in zip(shifted, exists, strict=True)]


def _stored(x: Hidden, context: Context, cache: CacheEntry, conv: ShortConvolution) -> list[Hidden]:
    """`_past` with a cache: store the inputs `x` in it and read earlier inputs from it."""
    new = x[:, None]  # (batch, one head, seq, d_model)
    held, _ = cache.update(new, new[..., :0])
    slots, exists = context.slots_before(conv.width)  # (batch, seq, width - 1)
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    taken = held[:, 0][rows, slots] * exists[..., None]
    return list(taken.unbind(2))
