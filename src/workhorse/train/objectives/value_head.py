"""The value head of a policy gradient, its loss, and advantages by GAE."""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config
from workhorse.nn import Decoder
from workhorse.nn.shapes import Hidden
from workhorse.train.objectives.objective import MOST, Weight


class ValuesConfig(Config):
    """A value head, whose values replace the baseline of the rewards (PPO, 1707.06347 eq. 9).

    It is a linear function of the hidden states after the final norm, 0 at first. The value at a
    position is the expected reward before its target is chosen. Checkpoints hold the head, but
    models do not: a new run with `init` has a new head.
    """

    weight: Weight = 0.1
    """Weight of the value loss: half the squared error, with the same denominator as the loss."""
    clip: float | None = Field(default=0.2, gt=0, le=MOST)
    """The loss is the larger of two: with the value, and with the value limited to this distance
    from the value at sampling, as in TRL. None: no limit. Each rollout has one update, so without
    dropout the distance is 0, up to rounding."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Decay of later errors of the values in an advantage (GAE, 1506.02438 eq. 16); 1: the
    advantage is the reward minus the value."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the rewards and values of later tokens."""
    whiten: bool = False
    """True to give the advantages of a batch's targets mean 0 and variance 1, as TRL does."""
    detach: bool = False
    """True to train only the head by the value loss; False: also the layers below it."""


class ValueHead(nn.Module):
    """`w · x + b` in float32, 0 at first."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        dtype = torch.promote_types(next(decoder.parameters()).dtype, torch.float32)
        at: dict[str, Any] = {"dtype": dtype, "device": decoder.device}
        self.weight = nn.Parameter(torch.zeros(1, decoder.config.d_model, **at))
        self.bias = nn.Parameter(torch.zeros(1, **at))

    def forward(self, x: Hidden) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)[..., 0]  # (batch, seq)


def gae(rewards: Tensor, values: Tensor, gamma: float, decay: float) -> Tensor:
    """`A_t = δ_t + γ λ A_{t+1}`, where `δ_t = r_t + γ V_{t+1} - V_t` (1506.02438 eq. 16).

    All are (batch, seq). Rewards and values must be 0 after the last target. `decay` is λ.
    """
    errors = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    advantages, following = torch.empty_like(errors), torch.zeros_like(errors[:, 0])
    for at in reversed(range(errors.shape[1])):
        advantages[:, at] = following = errors[:, at] + gamma * decay * following
    return advantages


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """`max((V - R)², (clip(V) - R)²) / 2` at each position, (batch, seq); see `ValuesConfig.clip`.

    Args:
        values: V, the current values.
        old: the values at sampling.
        returns: R.
        clip: largest distance of clip(V) from the old value; None: no limit.
    """
    errors = (values - returns).square()
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return errors / 2
