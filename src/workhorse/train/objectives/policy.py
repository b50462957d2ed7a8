"""Policy gradients on sampled completions, from REINFORCE to GSPO, and their advantages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.nn import IGNORE, Decoder, TokenLogprobs
from workhorse.nn.logprobs import count_of
from workhorse.train.objectives.objective import (
    MOST,
    ModelObjective,
    ObjectiveConfig,
    Outcome,
    Team,
    Weight,
    target_weights,
)
from workhorse.train.objectives.value_head import ValueHead, ValuesConfig, gae, value_losses

FAR_FROM_ONE = 0.1
"""The logged `ratio_outside` counts ratios that differ from 1 by more than this."""


@dataclass(frozen=True)
class PolicyBatch(Batch):
    """Sampled completions; `targets` is `IGNORE` except for sampled tokens."""

    old_logprobs: Tensor | None = None
    """Log-probabilities of the targets, recorded when they were sampled, `(batch, seq)`."""
    advantages: Tensor | None = None
    """Advantages, `(batch,)` or, one for each target, `(batch, seq)`."""
    reference_tokens: Tensor | None = None
    """Log-probabilities of the targets under the reference model, `(batch, seq)`."""
    old_values: Tensor | None = None
    """Values that the value head gave when the targets were sampled, `(batch, seq)`."""
    returns: Tensor | None = None
    """Returns that the value head learns, `(batch, seq)`."""


class PolicyConfig(ObjectiveConfig):
    """A policy gradient on completions: `-ratio · advantage`, summed and divided as configured.

    | method | ratio | clip | limits: low, high | denominator | advantages |
    |---|---|---|---|---|---|
    | REINFORCE, RLOO (2402.14740) | none | | none | constant, 1 | batch, leave_one_out |
    | PPO (1707.06347 eq. 7), `values: {}` | token | surrogate | 0.2, 0.2 | tokens | none |
    | PPO without values | token | surrogate | 0.2, 0.2 | tokens | batch |
    | GRPO (2402.03300 eq. 3) | token | surrogate | 0.2, 0.2 | sequences | group_std |
    | Dr. GRPO (2503.20783 §3.2) | token | surrogate | 0.2, 0.2 | constant | group |
    | DAPO (2503.14476 eq. 8) | token | surrogate | 0.2, 0.28 | tokens | group_std |
    | GSPO (2507.18071 eq. 5) | sequence | surrogate | 3e-4, 4e-4 | sequences | group_std |
    | CISPO (2506.13585 eq. 4) | token | weight | none, tuned | tokens | group_std |

    GRPO adds `kl_weight` 0.04 with the estimator k3; the others of this table do not need it.
    """

    kind: Literal["policy"] = "policy"
    needs = ("old_logprobs", "advantages")
    headline = ("reward", "kl", "entropy")
    source = "rollouts"
    rewarded = True
    ratio: Literal["token", "sequence", "none"] = "token"
    """Probability of the sampled tokens now, divided by that when they were sampled: of each token,
    or the geometric mean over each completion. `none`: 1, with the gradient of log p, which is
    right if the model has not changed since."""
    clip: Literal["surrogate", "weight"] = "surrogate"
    """`surrogate`: `-min(r A, clip(r) A)`, so tokens beyond a limit can lose their gradient.
    `weight`: `-clip(r) A log p`, where the factor has no gradient, so all tokens keep theirs."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The lower limit of a ratio is 1 minus this; None: no limit."""
    clip_high: float | None = Field(default=None, gt=0, le=MOST)
    """The upper limit of a ratio is 1 plus this; None: no limit."""
    denominator: Literal["tokens", "sequences", "constant"] = "tokens"
    """`tokens`: mean over all tokens of the batch. `sequences`: mean over completions of the means
    over their tokens. `constant`: mean over completions of the sums divided by `max_length`."""
    max_length: int | None = Field(default=None, ge=1)
    """The constant denominator of a completion, in tokens; 1 for sums over tokens."""
    kl_weight: Weight = 0.0
    """Weight of the estimated KL divergence from the reference model. The estimate has the same
    denominator as the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate from `d = log p - log p_reference` of each token, for completions of the model
    itself. `k1`: d; the mean of its gradient is 0. `k2`: `d² / 2`, with the gradient of
    KL(model || reference). `k3`: `exp(-d) - 1 + d`, with that of KL(reference || model)."""
    entropy_weight: Weight = 0.0
    """Weight of the entropy of the predictions, averaged as the loss and subtracted from it."""
    values: ValuesConfig | None = None
    """A value head that is trained with the model, for advantages by GAE. None: `rollouts.baseline`
    determines the advantages."""

    def model_post_init(self, _context: object) -> None:
        limits = self.clip_low, self.clip_high
        if self.ratio == "none" and limits != (None, None):
            raise ConfigError("clip_low and clip_high have no effect on ratio=none; remove them")
        if (self.denominator == "constant") != (self.max_length is not None):
            raise ConfigError(
                f"denominator={self.denominator} does not fit max_length={self.max_length}; "
                "set max_length if, and only if, denominator is constant"
            )

    @property
    def reference(self) -> Literal["token"] | None:
        return "token" if self.kl_weight > 0 else None

    @property
    def critic(self) -> ValuesConfig | None:
        return self.values

    def synthetic(self, tokens: Tensor, documents: Tensor | None = None) -> PolicyBatch:
        batch, zeros = super().synthetic(tokens, documents), torch.zeros_like(tokens).float()
        names = ("old_logprobs", "advantages", "reference_tokens", "old_values", "returns")
        return PolicyBatch(**vars(batch), **dict.fromkeys(names, zeros))

    def build(self, decoder: Decoder, team: Team = None) -> "Policy":
        low, high = self.clip_low, self.clip_high
        limits = -inf if low is None else 1 - low, inf if high is None else 1 + high
        kinds = {"token": Policy, "sequence": SequencePolicy, "none": OnPolicy}
        return kinds[self.ratio](
            decoder,
            loss=partial(LOSSES[self.clip], limits=limits),
            kl=KL_ESTIMATORS[self.kl_estimator],
            kl_weight=self.kl_weight,
            entropy_weight=self.entropy_weight,
            per_token=self.denominator == "tokens",
            max_length=self.max_length,
            values=self.values,
            team=team,
        )


class Policy(ModelObjective):
    """`Σ loss(ratio, advantage, log p) + kl_weight · kl - entropy_weight · entropy` over targets.

    With a value head, its loss is added, see `ValuesConfig`.

    Args:
        decoder: the model to train.
        loss: one of `LOSSES`, with its limits.
        kl: one of `KL_ESTIMATORS`.
        kl_weight: weight of the estimated KL divergence.
        entropy_weight: weight of the entropy.
        per_token: True if the denominator is the number of targets; otherwise the sum of each row
            is divided by `max_length`, and the denominator is the number of rows.
        max_length: divisor of the sum of a row; None: its number of targets.
        values: the options of the value head; None for no head.
        team: see `Team` in `objective.py`.
    """

    denominator = "sequences"

    def __init__(
        self,
        decoder: Decoder,
        *,
        loss: "PolicyLoss",
        kl: "KlEstimator",
        kl_weight: float = 0.0,
        entropy_weight: float = 0.0,
        per_token: bool = True,
        max_length: int | None = None,
        values: ValuesConfig | None = None,
        team: Team = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(entropy=True), team)
        self.values = values
        self.value_head = None if values is None else ValueHead(decoder)
        self.loss = loss
        self.kl = kl
        self.kl_weight = kl_weight
        self.entropy_weight = entropy_weight
        self.per_token = per_token
        self.max_length = max_length

    def count(self, batch: PolicyBatch) -> Tensor:
        return count_of(batch.targets, batch.weights) if self.per_token else super().count(batch)

    def forward(self, batch: PolicyBatch) -> Outcome:
        x, (logprobs, _, entropy) = self.hidden_and_score(batch)
        weights, lengths = target_weights(batch), self.sequence_weights(batch)
        assert batch.advantages is not None
        assert batch.reference_tokens is not None or not self.kl_weight
        advantages = batch.advantages.view(len(batch), -1)  # (batch, 1) or (batch, seq)
        log_ratios = self.log_ratios(logprobs, batch)
        losses, clipped = self.loss(log_ratios.exp(), advantages, logprobs)
        losses = losses - self.entropy_weight * entropy
        figures = {
            "entropy": entropy,
            "clip_fraction": clipped.float(),
            "ratio_outside": ((log_ratios.exp() - 1).abs() > FAR_FROM_ONE).float(),
            "kl_old": k3(-log_ratios),
        }
        if batch.reference_tokens is not None:
            kl = self.kl(_difference(logprobs, batch.reference_tokens, batch))
            losses, figures["kl"] = losses + self.kl_weight * kl, kl
        if self.values is not None and self.value_head is not None:
            values = self.value_head(x.detach() if self.values.detach else x)
            assert batch.old_values is not None
            assert batch.returns is not None
            errors = value_losses(values, batch.old_values, batch.returns, self.values.clip)
            errors = errors.where(batch.targets != IGNORE, 0)
            losses, figures["value_loss"] = losses + self.values.weight * errors, errors

        def in_rows(of_tokens: Tensor, divisor: Tensor | int) -> Tensor:
            return self.over_sequences((of_tokens * weights).sum(dim=1)) / divisor

        mean = 1 if self.per_token else lengths.clamp(min=1)
        divisor = mean if self.max_length is None else self.max_length
        sums = {
            name: in_rows(figure.detach().expand_as(weights), mean).sum()
            for name, figure in figures.items()
        }
        count = lengths.sum() if self.per_token else (lengths > 0).sum()
        return Outcome(in_rows(losses, divisor).sum(), count, sums)

    def values_at(self, batch: PolicyBatch) -> Tensor:
        """Compute the value at each position, (batch, seq)."""
        assert self.value_head is not None
        return self.value_head(self.hidden(self.decoder, batch))

    def state(self) -> dict[str, Any]:
        head = {} if self.value_head is None else self.value_head.state_dict()
        return {name: weight.tolist() for name, weight in head.items()}

    def load(self, state: dict[str, Any]) -> None:
        if self.value_head is not None and state:
            head = {name: torch.tensor(weight) for name, weight in state.items()}
            self.value_head.load_state_dict(head)

    def log_ratios(self, logprobs: Tensor, batch: PolicyBatch) -> Tensor:
        """Compute the logarithm of each token's ratio, (batch, seq), or of each row's, (batch, 1).

        It is 0 at positions without a target.
        """
        assert batch.old_logprobs is not None
        return _difference(logprobs, batch.old_logprobs, batch)


class SequencePolicy(Policy):
    """A policy gradient whose ratio is the geometric mean over a row (GSPO, 2507.18071 eq. 7)."""

    def log_ratios(self, logprobs: Tensor, batch: PolicyBatch) -> Tensor:
        of_tokens = super().log_ratios(logprobs, batch) * target_weights(batch)
        total = self.over_sequences(of_tokens.sum(dim=1))
        return (total / self.sequence_weights(batch).clamp(min=1))[:, None]


class OnPolicy(Policy):
    """A policy gradient for completions of the current model: ratios of 1 that have a gradient."""

    def log_ratios(self, logprobs: Tensor, batch: PolicyBatch) -> Tensor:
        return logprobs - logprobs.detach()


def _difference(logprobs: Tensor, before: Tensor, batch: Batch) -> Tensor:
    """`logprobs - before` at targets, and 0 at other positions, such as padding."""
    return (logprobs - before).where(batch.targets != IGNORE, 0)


Limits = tuple[float, float]
PolicyLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes the losses of tokens from ratios, advantages and log-probabilities, and a bool tensor,
True if a ratio was clipped. The shapes are (batch, seq), or (batch, 1) if equal for a row."""
KlEstimator = Callable[[Tensor], Tensor]
"""Estimates the KL divergence at each target from `log p - log p_reference`."""


def surrogate(
    ratios: Tensor, advantages: Tensor, logprobs: Tensor, limits: Limits
) -> tuple[Tensor, Tensor]:
    """`-min(ratio · A, clip(ratio) · A)` (PPO, 1707.06347 eq. 7)."""
    free, clipped = ratios * advantages, ratios.clamp(*limits) * advantages
    return -torch.minimum(free, clipped).expand_as(logprobs), clipped < free


def clipped_weight(
    ratios: Tensor, advantages: Tensor, logprobs: Tensor, limits: Limits
) -> tuple[Tensor, Tensor]:
    """`-clip(ratio) · A · log p`, with a gradient only through log p (CISPO, 2506.13585 eq. 4)."""
    weights = ratios.detach().clamp(*limits)
    return -weights * advantages * logprobs, weights != ratios


def k3(d: Tensor) -> Tensor:
    """`exp(-d) - 1 + d`, which is never negative."""
    return torch.expm1(-d) + d


LOSSES = {"surrogate": surrogate, "weight": clipped_weight}
KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": k3,
}
Baseline = Literal["none", "batch", "group", "group_std", "leave_one_out"]


def advantages_of(rewards: Tensor, group: Tensor, baseline: Baseline, eps: float = 1e-4) -> Tensor:
    """Compute the advantages of completions from their rewards, (batch).

    Advantages of completions with equal rewards are exactly 0.

    Args:
        rewards: (batch) rewards.
        group: (batch) group ids; the completions of a prompt are adjacent and have the same id.
        baseline: the value that is subtracted from each reward. `batch`: the mean of the batch.
            `group`: the mean of the group (Dr. GRPO). `group_std`: the same, and the difference is
            divided by the group's standard deviation, with n - 1 degrees of freedom, plus eps
            (GRPO). `leave_one_out`: the mean of the other completions of the group (RLOO).
        eps: see `group_std`.

    Raises:
        WorkhorseError: a group has only one completion, but the baseline compares several.
    """
    if baseline == "none":
        return rewards
    if baseline == "batch":
        group = torch.zeros_like(group)
    _, index, sizes = group.unique_consecutive(return_inverse=True, return_counts=True)
    if sizes.min() < 2 and baseline != "batch":  # noqa: PLR2004 - two can be compared
        raise WorkhorseError(f"a group has 1 completion; baseline={baseline} needs at least 2")
    zeros = rewards.new_zeros(len(sizes))
    above_first = rewards - rewards[sizes.cumsum(0) - sizes][index]
    centred = above_first - (zeros.index_add(0, index, above_first) / sizes)[index]
    if baseline == "leave_one_out":
        return centred * (sizes / (sizes - 1))[index]
    if baseline == "group_std":
        variances = zeros.index_add(0, index, centred.square()) / (sizes - 1)
        return centred / (variances.sqrt()[index] + eps)
    return centred


def with_advantages(batch: PolicyBatch, values: Tensor, config: ValuesConfig) -> PolicyBatch:
    """Replace the rewards of a batch by advantages, and add values and returns.

    Args:
        batch: its `advantages` are rewards: `(batch, seq)`, or `(batch,)` for rewards of the
            last targets. No value follows the last target, whether it ends the completion or
            only reaches the maximum length.
        values: the values at the targets, `(batch, seq)`.
        config: the options of GAE.
    """
    assert batch.advantages is not None
    learned, rewards = batch.targets != IGNORE, batch.advantages
    rewarded = learned if rewards.ndim > 1 else learned & ~F.pad(learned[:, 1:], (0, 1))
    rewards = rewards.view(len(learned), -1).where(rewarded, 0)
    values = values.where(learned, 0)
    advantages = gae(rewards, values, config.gamma, config.gae_lambda).where(learned, 0)
    returns = advantages + values
    if config.whiten and learned.any():
        of_targets = advantages[learned].double()
        of_targets = advantages_of(of_targets, torch.zeros_like(of_targets), "batch")
        variance = of_targets.var(correction=int(len(of_targets) > 1))  # 0 for one target
        scaled = of_targets / (variance + 1e-8).sqrt()
        advantages = advantages.masked_scatter(learned, scaled.to(advantages.dtype))
    return replace(batch, advantages=advantages, old_values=values, returns=returns)
