"""Positions that are added: to the embedding (learned, sinusoidal) or to scores (ALiBi).

Rotations of queries and keys are in `rope`.
"""

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config
from workhorse.nn.elementwise import Unchanged
from workhorse.nn.shapes import Hidden, Positions

OF_THE_EMBEDDING = {
    f"position={kind}": "set this kind of position in model.embedding.position"
    for kind in ("learned", "sinusoidal")
}
OF_THE_ATTENTION = {
    f"position={kind}": "set this kind of position in model.blocks.NAME.attention.position"
    for kind in ("rope", "alibi")
}
OF_PARTS = {
    "position": "set learned or sinusoidal positions in model.embedding.position, rope or alibi "
    "in model.blocks.NAME.attention.position"
}
"""Remedies for a `position` key in `model` itself, for error messages; see `Config.elsewhere`."""


class NoPositionConfig(Config):
    """No position is added and nothing is rotated: only the causal mask gives order (NoPE)."""

    kind: Literal["none"] = "none"

    def build(self, max_seq_len: int, d_model: int) -> Unchanged:
        del max_seq_len, d_model
        return Unchanged()


class LearnedPositionConfig(Config):
    """One trained vector per position, as in GPT."""

    kind: Literal["learned"] = "learned"
    offset: int = Field(default=0, ge=0)
    """Number of unused rows of the table before the row of position 0 (OPT: 2)."""

    def build(self, max_seq_len: int, d_model: int) -> "LearnedPositions":
        return LearnedPositions(max_seq_len, d_model, offset=self.offset)


class LearnedPositions(nn.Module):
    """Adds row `offset + s` of a table to the token at position `s`; padding uses position 0."""

    def __init__(self, max_seq_len: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(offset + max_seq_len, d_model)

    def forward(self, x: Hidden, positions: Positions) -> Hidden:
        return x + self.table(positions.clamp(min=0) + self.offset)


class SinusoidalPositionConfig(Config):
    """`sin(s / theta^(2i/d_model))` and its cosine, for position s and each pair i of features.

    Paper: Attention Is All You Need, 1706.03762 §3.5.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    theta: float = Field(default=10_000.0, gt=0)
    """Approximate ratio of the fastest to the slowest frequency."""
    layout: Literal["interleaved", "halves"] = "interleaved"
    """`interleaved` alternates sines and cosines (the paper); `halves` puts all sines first
    (CTRL, XGLM)."""
    spacing: Literal["half", "half_minus_one"] = "half"
    """The divisor of i in the exponent of theta: d_model/2, or d_model/2 - 1, with which the
    slowest wave is exactly theta times slower than the fastest (XGLM)."""
    offset: int = Field(default=0, ge=0)
    """Added to every position (XGLM: 2)."""

    def build(self, max_seq_len: int, d_model: int) -> "SinusoidalPositions":
        del max_seq_len
        return SinusoidalPositions(d_model, self)


class SinusoidalPositions(nn.Module):
    """Adds sinusoidal vectors, which are computed at each call, for any position."""

    def __init__(self, d_model: int, config: SinusoidalPositionConfig | None = None) -> None:
        super().__init__()
        self.d_model = d_model
        self.wave = config or SinusoidalPositionConfig()

    def forward(self, x: Hidden, positions: Positions) -> Hidden:
        return x + self.vectors(positions).to(x.dtype)

    def vectors(self, positions: Positions) -> Float[Tensor, "#batch seq d_model"]:
        """The sinusoidal vectors of these positions, in float32."""
        speeds = self.speeds(positions.device)
        placed = (positions + self.wave.offset).float()
        angles = placed.unsqueeze(-1) * speeds  # (batch, seq, half)
        pair = (angles.sin(), angles.cos())
        if self.wave.layout == "interleaved":
            return torch.stack(pair, dim=-1).flatten(-2)[..., : self.d_model]
        return torch.cat((pair[0], pair[1][..., : self.d_model - len(speeds)]), dim=-1)

    def speeds(self, device: torch.device) -> Float[Tensor, " half"]:
        """The angle of each pair of features per position, float32."""
        half = (self.d_model + 1) // 2
        divisor = self.d_model / 2 if self.wave.spacing == "half" else max(half - 1, 1)
        exponents = torch.arange(half, device=device, dtype=torch.float32) / divisor
        return self.wave.theta**-exponents


EmbeddingPositionConfig = Annotated[
    NoPositionConfig | LearnedPositionConfig | SinusoidalPositionConfig, Field(discriminator="kind")
]


class AlibiConfig(Config):
    """Add `-slope_h * |i - j|` to the scores of head h, for query position i and key position j.

    Paper: Train Short, Test Long, 2108.12409.
    """

    kind: Literal["alibi"] = "alibi"
    max_bias: float = Field(default=8.0, gt=0)
    """The last head's slope is `2^-max_bias` (MPT's `alibi_bias_max`)."""
    scaled: bool = False
    """Multiply the bias by the attention scale, like the scores (Falcon)."""
    bfloat16: bool = False
    """Round slopes, and their products with key positions, to bfloat16, as Falcon does even if the
    model has another dtype."""

    def slopes(self, n_heads: int) -> tuple[float, ...]:
        return alibi_slopes(n_heads, self.max_bias)


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """ALiBi's slope of each head h from 1 to `n_heads`.

    It is `2^(-max_bias h / n_heads)` if `n_heads` is a power of two. Other head counts get the
    slopes of the next lower power of two, then every second slope of the next higher one, as in the
    paper's code.
    """
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-max_bias * head / below) for head in range(1, below + 1)]
    between = [2 ** (-max_bias * head / (2 * below)) for head in range(1, 2 * below, 2)]
    return tuple((slopes + between)[:n_heads])
