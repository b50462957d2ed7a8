"""Rotations scaled to texts longer than those of training: slower angles, and an amplitude."""

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from workhorse.config.base import Config, ConfigError

Frequencies = Float[Tensor, " rotary_half"]
"""Radians per position, for each pair of features."""


class ScalingConfig(Config):
    """How a rotation is stretched past the length it was trained for."""

    @abstractmethod
    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        """Radians per position, for each pair, in a text of `length` tokens."""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0


class LinearScalingConfig(ScalingConfig):
    """Positions divided by `factor`. Paper: Position Interpolation, 2306.15595."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(gt=0)
    """How many times longer texts may be."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        del length
        return inverse_powers(theta, rotary_dim, device) / self.factor


class DynamicNtkScalingConfig(ScalingConfig):
    """Past the original length, a larger theta that depends on the length of the text so far.

    The angles of early tokens change as the text grows, so decoding with a cache cannot equal the
    full forward; as in the reference, cached keys keep the angles they were stored with.
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = Field(ge=1)
    """How fast theta grows with the length."""
    original_max_seq_len: int = Field(gt=0)
    """The longest text, in tokens, whose angles stay as they were in training."""

    def frequencies(
        self, theta: float, rotary_dim: int, length: int, device: torch.device
    ) -> Frequencies:
        stretch = self.factor * max(length, self.original_max_seq_len) / self.original_max_seq_len
        growth = stretch - (self.factor - 1)
        theta = theta * growth ** (rotary_dim / (rotary_dim - 2))
        return inverse_powers(theta, rotary_dim, device)


class YarnScalingConfig(ScalingConfig):
    """Slow pairs interpolated, fast pairs left alone, a ramp between. Paper: YaRN, 2309.00071."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    """How many times longer texts may be."""
    original_max_seq_len: int = Field(gt=0)
    """The longest text of the original training, in tokens."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs that turn more often than this over the original length are left alone."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Pairs that turn less often than this are fully interpolated."""
    mscale: float = 1.0
    """Factor on the logarithm in the amplitude; used only with `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """DeepSeek divides by this one's amplitude and multiplies the softmax scale by its square."""
    attention_factor: float | None = None
    """Amplitude: the factor on cosines and sines; the paper's `0.1 ln(factor) + 1` by default."""
    truncate: bool = True
    """Round the ends of the ramp to whole pairs (gpt-oss does not)."""

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
        """The (fractional) pair that makes `turns` full turns over the original length."""
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
        """`0.1 mscale ln(factor) + 1`."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


class Llama3ScalingConfig(ScalingConfig):
    """Long waves interpolated, short ones left alone, blended between (Llama 3.1, 2407.21783)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    """How many times slower the long waves turn."""
    low_freq_factor: float = Field(gt=0)
    """Pairs that turn fewer times over the original length are slowed by the whole factor."""
    high_freq_factor: float = Field(gt=0)
    """Pairs that turn more often over the original length are left alone."""
    original_max_seq_len: int = Field(gt=0)
    """The longest text of the original training, in tokens."""

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
    """A divisor per pair found by search: one list up to the original length, another beyond it.

    Like dynamic NTK it depends on the length of the text: crossing the original length changes all
    angles at once, and cached keys keep theirs. Paper: LongRoPE, 2402.13753.
    """

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    """The divisor of each pair in texts up to the original length."""
    long_factor: tuple[float, ...]
    """The divisor of each pair in longer texts."""
    original_max_seq_len: int = Field(gt=1)
    """The longest text of the original training, in tokens."""
    factor: float = Field(ge=1)
    """How far the context was extended; gives the amplitude unless `attention_factor` does."""
    attention_factor: float | None = None
    """Amplitude; left out: `sqrt(1 + ln(factor) / ln(original_max_seq_len))`."""

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
