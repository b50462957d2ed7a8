"""Rotary positions: pairs of query and key features rotated by an angle proportional to position.

A rotation holds no state. The angles are computed once per forward for each distinct `RopeConfig`
(see `context`), in float32, so that neither casting nor moving the model can degrade them.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal, cast

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from workhorse.config.base import Config, ConfigError
from workhorse.nn.shapes import Angles, Lengths, Positions

Frequencies = Float[Tensor, " rotary_half"]
"""Radians per position, for each pair of features."""


class ScalingConfig(Config):
    """Scaling of a rotation for sequences longer than in training."""

    @abstractmethod
    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        """Radians per position, for each pair, in a sequence of `length` tokens."""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0


class LinearScalingConfig(ScalingConfig):
    """Positions divided by `factor`. Paper: Position Interpolation, 2306.15595."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(gt=0)
    """Ratio of the extended to the original maximum sequence length."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        del length
        return inverse_powers(theta, rotary_dim, device) / self.factor


class DynamicNtkScalingConfig(ScalingConfig):
    """Beyond the original length, theta grows with the current length of the sequence.

    The angles of early tokens change as the sequence grows, but cached keys keep the angles that
    they were stored with, as in transformers. Therefore decoding with a cache differs from a full
    forward pass.
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = Field(ge=1)
    """Growth rate of theta with the sequence length."""
    original_max_seq_len: int = Field(gt=0)
    """Length, in tokens, up to which sequences keep the angles of training."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        stretch = self.factor * max(length, self.original_max_seq_len) / self.original_max_seq_len
        growth = stretch - (self.factor - 1)
        theta = theta * growth ** (rotary_dim / (rotary_dim - 2))
        return inverse_powers(theta, rotary_dim, device)


class YarnScalingConfig(ScalingConfig):
    """YaRN: slow pairs of features are slowed by `factor`, fast pairs are unchanged (2309.00071).

    Pairs in between are slowed by less than `factor`.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    """Ratio of the extended to the original maximum sequence length."""
    original_max_seq_len: int = Field(gt=0)
    """Maximum sequence length of the original training, in tokens."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs that make more full turns than this in the original length are unchanged."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Pairs that make fewer full turns than this in the original length are slowed by `factor`."""
    mscale: float = 1.0
    """`m` in the amplitude `0.1 m ln(factor) + 1`; used only with `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """If set, the amplitude is `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)`.
    DeepSeek's models also multiply the attention scale by the square of the divisor."""
    attention_factor: float | None = None
    """Amplitude: the factor on cosines and sines. None: the paper's `0.1 ln(factor) + 1`."""
    truncate: bool = True
    """Round the bounds between fast and slow pairs to whole pairs (gpt-oss: false)."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        del length
        low = self._pair_turning(self.beta_fast, theta, rotary_dim)
        high = self._pair_turning(self.beta_slow, theta, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
        # 0.001 avoids a division by zero, as in the paper's code.
        ramp = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
        plain = inverse_powers(theta, rotary_dim, device)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def model_post_init(self, _context: object) -> None:
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"beta_fast={self.beta_fast} is not above beta_slow={self.beta_slow}; "
                "swap or separate them"
            )

    def _pair_turning(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Index (may be fractional) of the pair that turns `turns` times in the original length."""
        ratio = self.original_max_seq_len / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)

    def growth(self, mscale: float) -> float:
        """The amplitude for a value of mscale: `0.1 mscale ln(factor) + 1`."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


class Llama3ScalingConfig(ScalingConfig):
    """Slow pairs of features are slowed by `factor`, fast pairs are unchanged (Llama 3.1).

    Pairs in between are slowed by less than `factor`. Paper: 2407.21783.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    """Divisor of the frequencies of slow pairs."""
    low_freq_factor: float = Field(gt=0)
    """Pairs that make fewer full turns than this in the original length are slowed by `factor`."""
    high_freq_factor: float = Field(gt=0)
    """Pairs that make more full turns than this in the original length are unchanged."""
    original_max_seq_len: int = Field(gt=0)
    """Maximum sequence length of the original training, in tokens."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        del length
        plain = inverse_powers(theta, rotary_dim, device)
        waves = self.original_max_seq_len * plain / (2 * math.pi)  # waves over the original length
        span = self.high_freq_factor - self.low_freq_factor
        kept = ((waves - self.low_freq_factor) / span).clamp(0, 1)
        return plain / self.factor * (1 - kept) + plain * kept

    def model_post_init(self, _context: object) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor={self.high_freq_factor} is not above "
                f"low_freq_factor={self.low_freq_factor}; swap or separate them"
            )


class LongRopeScalingConfig(ScalingConfig):
    """LongRoPE: a separate divisor of each pair's frequency, found by a search (2402.13753).

    Sequences beyond the original length use other divisors than shorter ones. When a sequence grows
    beyond this length, cached keys keep their old angles.
    """

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    """The divisor of each pair in sequences up to the original length."""
    long_factor: tuple[float, ...]
    """The divisor of each pair in longer sequences."""
    original_max_seq_len: int = Field(gt=1)
    """Maximum sequence length of the original training, in tokens."""
    factor: float = Field(ge=1)
    """Factor by which the context was extended. The amplitude is computed from it unless
    `attention_factor` is set."""
    attention_factor: float | None = None
    """Amplitude: the factor on cosines and sines. None: `sqrt(1 + ln(factor) /
    ln(original_max_seq_len))`."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        long = length > self.original_max_seq_len
        divisors = torch.tensor(self.long_factor if long else self.short_factor, device=device)
        return inverse_powers(theta, rotary_dim, device) / divisors

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))


RopeScalingConfig = Annotated[
    LinearScalingConfig
    | DynamicNtkScalingConfig
    | YarnScalingConfig
    | Llama3ScalingConfig
    | LongRopeScalingConfig,
    Field(discriminator="kind"),
]


def inverse_powers(theta: float, rotary_dim: int, device: torch.device) -> Frequencies:
    """`theta^(-2i/rotary_dim)` for each pair i, in float32."""
    exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    return 1.0 / theta**exponents


class RopeConfig(Config):
    """Rotate pair `i` of queries and keys by `position * theta^(-2i/rotary_dim)`.

    Paper: RoFormer, 2104.09864.
    """

    kind: Literal["rope"] = "rope"
    theta: float = Field(default=10_000.0, gt=1)
    """Base of the angles: the slowest pair makes a full turn in about `2π · theta` tokens."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """The fraction of the head's features that is rotated; the rest stays unchanged. If their
    number is odd, one more feature is rotated, as in transformers."""
    pairing: Literal["half", "interleaved"] = "half"
    """Feature i is paired with i + rotary_dim/2 (`half`) or with its neighbour (`interleaved`). A
    checkpoint needs the pairing of its training; the other gives plausible but wrong outputs."""
    reverse: bool = False
    """Rotate in the opposite direction (nanochat)."""
    precision: Literal["native", "float32"] = "native"
    """`float32` rotates queries and keys in float32 (OLMo, Cohere), `native` in their own dtype."""
    scaling: RopeScalingConfig | None = None
    """Scaling of the rotation for sequences longer than in training, or None."""

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated features of a head: the denominator in the exponent of theta.

        If it is odd, one more feature is rotated.

        Raises:
            ConfigError: the features cannot be paired, or the scaling does not support their
                number.
        """
        rotary_dim = int(head_dim * self.fraction)
        pairs = (rotary_dim + 1) // 2
        odd_ramp = rotary_dim % 2 and isinstance(self.scaling, YarnScalingConfig)
        if rotary_dim == 0 or 2 * pairs > head_dim or odd_ramp:
            raise ConfigError(
                f"fraction={self.fraction} of head_dim={head_dim} rotates {rotary_dim} features, "
                "which cannot be paired; choose a fraction that gives an even number"
            )
        match self.scaling:
            case LongRopeScalingConfig(short_factor=short, long_factor=long):
                if {len(short), len(long)} != {pairs}:
                    raise ConfigError(
                        f"longrope has {len(short)} short and {len(long)} long factors for "
                        f"{pairs} pairs; give one factor per pair"
                    )
            case DynamicNtkScalingConfig() if rotary_dim <= 2:  # noqa: PLR2004
                raise ConfigError("dynamic_ntk needs at least two pairs; choose a wider head_dim")
            case _:
                pass
        return rotary_dim

    @property
    def steady_length(self) -> int | None:
        """Length, in tokens, up to which a growing sequence keeps its angles; None: no limit."""
        match self.scaling:
            case DynamicNtkScalingConfig() | LongRopeScalingConfig() as scaling:
                return scaling.original_max_seq_len
            case _:
                return None

    @property
    def depends_on_length(self) -> bool:
        """True if the angle of a token changes as the sequence grows."""
        return self.steady_length is not None

    def angles(
        self, positions: Positions, head_dim: int, length: int | Lengths
    ) -> tuple[Angles, Angles]:
        """Cosines and sines in float32, `(batch or 1, 1, seq, pairs)` each.

        Args:
            positions: position of each token; padding may have any position.
            head_dim: width of a head.
            length: current sequence length, given per row or per token if they differ; used only by
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
    ) -> Float[Tensor, "*sequences rotary_half"]:
        """Frequencies: `(pairs)` for one length, `(batch, 1, seq or 1, pairs)` for several."""
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
