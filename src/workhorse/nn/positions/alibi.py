"""Linear position biases: a score is lowered by `slope_h` for each token of distance."""

import math
from typing import Literal

from pydantic import Field

from workhorse.config.base import Config


class AlibiConfig(Config):
    """Add `-slope_h * |i - j|` to the scores. Nothing is learned.

    Paper: Train Short, Test Long, 2108.12409.
    """

    kind: Literal["alibi"] = "alibi"
    max_bias: float = Field(default=8.0, gt=0)
    """The last head's slope is `2^-max_bias` (MPT's `alibi_bias_max`)."""
    scaled: bool = False
    """Multiply the bias by the attention scale, like the scores (Falcon)."""
    bfloat16: bool = False
    """Round slopes and their products with key positions to bfloat16, even in float32 (Falcon)."""

    def slopes(self, n_heads: int) -> tuple[float, ...]:
        return alibi_slopes(n_heads, self.max_bias)


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """`2^(-max_bias h / n_heads)`, `h = 1 … n_heads`, for a power of two.

    For other counts the slopes of the power of two below, then every second slope of the power of
    two above, as the paper's code has it.
    """
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-max_bias * head / below) for head in range(1, below + 1)]
    between = [2 ** (-max_bias * head / (2 * below)) for head in range(1, 2 * below, 2)]
    return tuple((slopes + between)[:n_heads])
