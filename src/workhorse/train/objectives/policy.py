"""Policy gradients: completions that the model generated are made more or less likely.

With the probability p of a token, its value q when the token was chosen, the ratio r = p / q and
the advantage A of the completion, the loss of a token is

- without ratio: -A log p (REINFORCE),
- with `clip: surrogate`: -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, 1707.06347 eq. 7),
- with `clip: weight`: -min(r, 1 + high) A log p, where the first factor has no gradient (CISPO,
  2506.13585).

method                     baseline        ratio     clip       clip_high  denominator
REINFORCE                  batch           none
RLOO (2402.14740)          leave_one_out   none                            sequences
PPO without values         batch           token     surrogate  0.2        tokens
GRPO (2402.03300)          group_std       token     surrogate  0.2        sequences
Dr. GRPO (2503.20783)      group           token     surrogate  0.2        constant
DAPO (2503.14476)          group_std       token     surrogate  0.28       tokens
GSPO (2507.18071)          group_std       sequence  surrogate  4e-4       sequences
CISPO (2506.13585)         group_std       token     weight                tokens

The baseline is an option of `train.rollouts`. For RLOO the log-probabilities of a completion are
added up, which is the constant denominator with `max_length: 1`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workhorse.config.base import ConfigError, OnResume
from workhorse.data import IGNORE, Batch
from workhorse.nn import Decoder, TokenLogprobs
from workhorse.train.objectives.objective import ModelObjective, ObjectiveConfig, Outcome

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import ContextParallelGroup

Baseline = Literal["none", "batch", "group", "group_std", "leave_one_out"]
EPSILON = 1e-4
"""Added to a standard deviation before a division by it."""


@dataclass(frozen=True)
class PolicyBatch(Batch):
    """Completions to learn from. Prompts have no targets."""

    old: Tensor | None = None
    """Log-probability of each target when it was chosen, `(batch, seq)` float32."""
    advantages: Tensor | None = None
    """The advantage of each row, `(batch,)` float32."""
    reference_tokens: Tensor | None = None
    """The reference model's log-probability of each target, `(batch, seq)` float32."""


def advantages(rewards: Tensor, group: Tensor, baseline: Baseline) -> Tensor:
    """Subtract a baseline from rewards.

    Args:
        rewards: (batch).
        group: (batch), the index of each row's prompt.
        baseline: see `RolloutConfig.baseline`. The standard deviation is the unbiased one.

    Returns:
        (batch), in the dtype of the rewards. It is 0 if a group has equal rewards, or if
        `leave_one_out` or `group_std` has only one row.
    """
    if baseline == "none":
        return rewards
    if baseline == "batch":
        return rewards - rewards.mean()
    _, index, size = group.unique(return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=rewards.dtype).index_add_(0, index, rewards)
    centred = rewards - (total / size)[index]
    others = (size - 1).clamp(min=1)
    if baseline == "group":
        return centred
    if baseline == "leave_one_out":
        return torch.where(size[index] > 1, centred * size[index] / others[index], 0)
    squares = torch.zeros_like(total).index_add_(0, index, centred.square())
    return centred / ((squares / others).sqrt()[index] + EPSILON)


class PolicyConfig(ObjectiveConfig):
    """Policy gradients on completions that the model generates; needs `train.rollouts`."""

    kind: Literal["policy"] = "policy"
    needs = ("old", "advantages")

    ratio: Annotated[Literal["none", "token", "sequence"], OnResume.CONTINUES] = "token"
    """The importance ratio: of each token, or of each completion (its geometric mean)."""
    clip: Annotated[Literal["surrogate", "weight"], OnResume.CONTINUES] = "surrogate"
    """What is clipped: the surrogate loss, or the ratio as a weight without gradient."""
    clip_low: Annotated[float, OnResume.CONTINUES] = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below 1 minus this value."""
    clip_high: Annotated[float, OnResume.CONTINUES] = Field(default=0.2, ge=0)
    """The ratio is clipped above 1 plus this value."""
    denominator: Annotated[Literal["tokens", "sequences", "constant"], OnResume.CONTINUES] = (
        "tokens"
    )
    """The mean of the loss: over all tokens of the batch; over completions, each with the mean over
    its tokens; or over completions, each with the sum over its tokens divided by `max_length`."""
    max_length: Annotated[int | None, OnResume.CONTINUES] = Field(default=None, ge=1)
    """The divisor for `denominator: constant`."""
    entropy: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0)
    """Weight of the entropy of each token's distribution, which is subtracted from the loss."""
    kl: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference model, which is added to the loss."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], OnResume.CONTINUES] = "k3"
    """With d = log p - log p_reference: k1 is d, whose gradient has the mean 0; k2 is d² / 2, whose
    gradient is that of the KL divergence; k3 is exp(-d) + d - 1 (GRPO), whose value is unbiased."""

    @model_validator(mode="after")
    def _fits_together(self) -> "PolicyConfig":
        if (self.denominator == "constant") != (self.max_length is not None):
            raise ConfigError(
                f"denominator={self.denominator} and max_length={self.max_length} do not fit; set "
                "max_length only with denominator=constant"
            )
        if self.ratio == "sequence" and self.clip == "weight":
            raise ConfigError("clip=weight needs the ratio of each token; set ratio=token")
        return self

    def build(self, decoder: Decoder, team: "ContextParallelGroup | None" = None) -> "Policy":
        return Policy(decoder, self, team)


class Policy(ModelObjective):
    """The policy-gradient loss of a `PolicyBatch`.

    Args:
        decoder: the model to train.
        config: the kind of loss.
        team: the ranks that each have a part of the same sequences; None if sequences are not
            split.
    """

    def __init__(
        self, decoder: Decoder, config: PolicyConfig, team: "ContextParallelGroup | None" = None
    ) -> None:
        super().__init__(decoder, TokenLogprobs(entropy=config.entropy > 0), team)
        self.config = config
        self.denominator = "tokens" if config.denominator == "tokens" else "sequences"

    def count(self, batch: Batch) -> Tensor:
        counted = batch.targets != IGNORE
        return counted.sum() if self.denominator == "tokens" else counted.any(dim=1).sum()

    def forward(self, batch: PolicyBatch) -> Outcome:
        config = self.config
        assert batch.old is not None
        assert batch.advantages is not None
        counted = (batch.targets != IGNORE).float()
        lengths = self.over_sequences(counted.sum(dim=1)).clamp(min=1)
        weights = counted * self._of_tokens(lengths)[:, None]
        found = self.score(batch)
        logprobs, advantage = found.target, batch.advantages[:, None]
        change = (logprobs - batch.old) * counted
        if config.ratio == "sequence":
            change = (self.over_sequences(change.sum(dim=1)) / lengths)[:, None].expand_as(change)
        ratio = change.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        if config.ratio == "none":
            of_tokens = -advantage * logprobs
            clips = torch.zeros_like(ratio)
        elif config.clip == "weight":
            clipped = ratio.clamp(max=1 + config.clip_high)
            of_tokens = -clipped.detach() * advantage * logprobs
            clips = (clipped != ratio).float()
        else:
            of_tokens = -torch.minimum(ratio * advantage, clipped * advantage)
            clips = (ratio * advantage > clipped * advantage).float()
        figures = {
            "clip_fraction": clips,
            "ratio_change": (ratio - 1).abs(),
            "change_kl": change.detach().expm1() - change.detach(),
        }
        if found.entropy is not None:
            of_tokens = of_tokens - config.entropy * found.entropy
            figures["entropy"] = found.entropy
        if config.kl:
            assert batch.reference_tokens is not None
            divergence = _divergence(logprobs - batch.reference_tokens, config.kl_estimator)
            of_tokens = of_tokens + config.kl * divergence
            figures["kl"] = divergence
        loss = (of_tokens * weights).sum()
        sums = {name: (one.detach() * weights).sum() for name, one in figures.items()}
        count = counted.sum() if self.denominator == "tokens" else counted.any(dim=1).sum()
        return Outcome(loss, count, sums)

    def _of_tokens(self, lengths: Tensor) -> Tensor:
        """Return the weight of each row's tokens."""
        match self.config.denominator:
            case "tokens":
                return torch.ones_like(lengths)
            case "sequences":
                return 1 / lengths
            case "constant":
                assert self.config.max_length is not None
                return torch.full_like(lengths, 1 / self.config.max_length)


def _divergence(change: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate the KL divergence from a log-ratio; see `PolicyConfig.kl_estimator`."""
    match estimator:
        case "k1":
            return change
        case "k2":
            return change.square() / 2
        case "k3":
            return (-change).expm1() + change
