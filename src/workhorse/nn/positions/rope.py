"""Rotary positions: pairs of query and key features rotated by an angle proportional to position.

A rotation holds no state. The angles are computed once per forward for each distinct `RopeConfig`
(see `context`), in float32, so that neither casting nor moving the model can degrade them.
"""

from typing import Literal, cast

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from workhorse.config.base import Config, ConfigError
from workhorse.nn.positions.rope_scaling import (
    DynamicNtkScalingConfig,
    LongRopeScalingConfig,
    RopeScalingConfig,
    ScalingConfig,
    YarnScalingConfig,
    inverse_powers,
)
from workhorse.nn.shapes import Angles, Lengths, Positions


class RopeConfig(Config):
    """Rotate pair `i` of queries and keys by `position * theta^(-2i/rotary_dim)`.

    Paper: RoFormer, 2104.09864.
    """

    kind: Literal["rope"] = "rope"
    theta: float = Field(default=10_000.0, gt=1)
    """Base of the angles: the slowest pair makes a full turn in about `2π · theta` tokens."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """The fraction of the head's width that is rotated; the rest stays unchanged. With an odd
    number of features, the last is paired with the one after it, as in transformers."""
    pairing: Literal["half", "interleaved"] = "half"
    """Feature i is paired with i + rotary_dim/2 (`half`) or with its neighbour (`interleaved`). A
    checkpoint is right with only one of them, and looks plausible with the other."""
    reverse: bool = False
    """Rotate in the opposite direction (nanochat)."""
    precision: Literal["native", "float32"] = "native"
    """`float32` rotates queries and keys in float32 whatever their dtype (OLMo, Cohere)."""
    scaling: RopeScalingConfig | None = None
    """How the rotation is stretched past the length it was trained for; left out: not at all."""

    def rotary_dim(self, head_dim: int) -> int:
        """The width that the frequencies are spread over.

        That many features of a head are rotated, or one more if the number is odd.

        Raises:
            ConfigError: the features cannot be paired, or a scaling has divisors for another width.
        """
        rotary_dim = int(head_dim * self.fraction)
        pairs = (rotary_dim + 1) // 2
        odd_ramp = rotary_dim % 2 and isinstance(self.scaling, YarnScalingConfig)
        if rotary_dim == 0 or 2 * pairs > head_dim or odd_ramp:
            raise ConfigError(
                f"fraction={self.fraction} of head_dim={head_dim} turns {rotary_dim} features, "
                "which cannot be paired; choose a fraction that gives an even number"
            )
        match self.scaling:
            case LongRopeScalingConfig(short_factor=short, long_factor=long):
                if {len(short), len(long)} != {pairs}:
                    raise ConfigError(
                        f"longrope has {len(short)} short and {len(long)} long factors for "
                        f"{pairs} pairs; give one factor a pair"
                    )
            case DynamicNtkScalingConfig() if rotary_dim <= 2:  # noqa: PLR2004
                raise ConfigError("dynamic_ntk needs at least two pairs; choose a wider head_dim")
            case _:
                pass
        return rotary_dim

    @property
    def steady_length(self) -> int | None:
        """The longest text whose tokens keep their angles as it grows; None: there is no limit."""
        match self.scaling:
            case DynamicNtkScalingConfig() | LongRopeScalingConfig() as scaling:
                return scaling.original_max_seq_len
            case _:
                return None

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a token changes as the text after it grows."""
        return self.steady_length is not None

    def angles(
        self, positions: Positions, head_dim: int, length: int | Lengths
    ) -> tuple[Angles, Angles]:
        """Cosines and sines in float32, `(batch or 1, 1, seq, pairs)` each.

        Args:
            positions: the position of each token; padding may hold anything.
            head_dim: width of a head.
            length: tokens in the text so far, per row or per token where they differ; used only by
                scalings that depend on it.
        """
        rotary_dim = self.rotary_dim(head_dim)
        device = positions.device
        frequencies, amplitude = inverse_powers(self.theta, rotary_dim, device), 1.0
        if self.scaling is not None:
            frequencies = self._scaled_frequencies(self.scaling, rotary_dim, length, device)
            amplitude = self.scaling.amplitude
        turned = positions.unsqueeze(1).unsqueeze(-1).float() * frequencies
        direction = -1.0 if self.reverse else 1.0
        return turned.cos() * amplitude, turned.sin() * (amplitude * direction)

    def _scaled_frequencies(
        self,
        scaling: ScalingConfig,
        rotary_dim: int,
        length: int | Lengths,
        device: torch.device,
    ) -> Float[Tensor, "*texts rotary_half"]:
        """For one text `(pairs)`; for several `(batch, 1, seq or 1, pairs)`, each as if alone."""
        if isinstance(length, int):
            return scaling.frequencies(self.theta, rotary_dim, length, device)
        lengths = length.clamp(min=self.steady_length or 0)
        distinct = cast(Tensor, lengths.unique())  # pyright: ignore[reportUnknownMemberType]
        each = [scaling.frequencies(self.theta, rotary_dim, int(n), device) for n in distinct.cpu()]
        which = torch.searchsorted(distinct, lengths)
        return torch.stack(each)[which].unsqueeze(1)


def rotate_half(x: Tensor, cos: Angles, sin: Angles) -> Tensor:
    """Rotate the pairs (i, i + pairs) of the first `2 · pairs` features.

    Args:
        x: (batch, heads, seq, head_dim).
        cos: (batch or 1, 1, seq, pairs), in the dtype of `x`.
        sin: like `cos`.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def rotate_interleaved(x: Tensor, cos: Angles, sin: Angles) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the first `2 · pairs` features; see `rotate_half`."""
    turning = 2 * cos.shape[-1]
    a, b, rest = x[..., 0:turning:2], x[..., 1:turning:2], x[..., turning:]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
