"""Learning-rate schedules: the factor of every learning rate at a step.

All warm up linearly to 1 and end at `final` after the last step; they differ in between.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from workhorse.config.base import Config

Fraction = Annotated[float, Field(ge=0, le=1)]


class WarmupConfig(Config):
    """The warm-up that all schedules share."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises; step s of them has the factor `(s + 1) / warmup_steps`."""

    def factor(self, step: int, steps: int) -> float:
        """The factor of the learning rates.

        Args:
            step: counted from 0.
            steps: of the whole run.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after_warmup((step - self.warmup_steps) / (steps - self.warmup_steps))

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """The factor after a share, from 0 to below 1, of the steps that follow the warm-up."""


class ConstantConfig(WarmupConfig):
    """Stays at the peak."""

    kind: Literal["constant"] = "constant"

    def after_warmup(self, progress: float) -> float:
        return 1.0


class LinearConfig(WarmupConfig):
    """Falls in a straight line."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0
    """What multiplies the learning rates after the last step."""

    def after_warmup(self, progress: float) -> float:
        return 1 - (1 - self.final) * progress


class CosineConfig(WarmupConfig):
    """Falls along half a cosine (1608.03983, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1
    """What multiplies the learning rates after the last step."""

    def after_warmup(self, progress: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


class WsdConfig(WarmupConfig):
    """Warm-up, stable, decay: stays at the peak, then falls in a straight line (2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps after warm-up in which the rate falls."""
    final: Fraction = 0.0
    """What multiplies the learning rates after the last step."""

    def after_warmup(self, progress: float) -> float:
        return 1 - (1 - self.final) * max(0.0, progress - (1 - self.decay)) / self.decay


ScheduleConfig = Annotated[
    CosineConfig | LinearConfig | WsdConfig | ConstantConfig, Field(discriminator="kind")
]
