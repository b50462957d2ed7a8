"""Preference objectives: DPO, ORPO and SimPO on pairs of answers, KTO on single answers.

The objectives on pairs differ in two functions: the reward of an answer, computed from its
log-probability, and the loss of a margin. The margin is the reward of the chosen answer minus that
of the rejected one. `Preference` combines the two functions. All losses are summed over pairs (or
answers) and divided by their number in the whole batch, so they do not depend on micro-batches.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from workhorse.config.base import ConfigError, OnResume
from workhorse.data import Batch
from workhorse.nn import Decoder, TokenLogprobs
from workhorse.train.objectives.objective import (
    ModelObjective,
    ObjectiveConfig,
    Outcome,
    Scale,
    Team,
    Weight,
)


class Answers(NamedTuple):
    """Values of answers, each in float32 or wider and of the same shape."""

    logprobs: Tensor
    """The weighted sum of the log-probabilities of an answer's tokens."""
    weights: Tensor
    """The sum of the weights of these tokens; without weights, the number of tokens."""
    reference: Tensor | None
    """`logprobs` of the reference model, or None if the batch has none."""

    @property
    def mean(self) -> Tensor:
        """The weighted mean of the log-probabilities of an answer's tokens."""
        return self.logprobs / self.weights


RewardFunction = Callable[[Answers], Tensor]
"""Computes the reward of each answer."""
MarginLoss = Callable[[Tensor], Tensor]
"""Computes the loss of each margin."""

SMOOTHED: Mapping[str, Callable[[float], MarginLoss]] = {
    "sigmoid": lambda epsilon: partial(sigmoid_loss, right=1 - epsilon, wrong=epsilon),
    "robust": lambda epsilon: partial(
        sigmoid_loss, right=(1 - epsilon) / (1 - 2 * epsilon), wrong=-epsilon / (1 - 2 * epsilon)
    ),
}
"""Losses of DPO that depend on the label smoothing ε. `DpoConfig` has the formulas."""
UNSMOOTHED: Mapping[str, Callable[..., Tensor]] = {
    "hinge": lambda margins, beta: F.relu(1 - margins),
    "ipo": lambda margins, beta: ((margins - 0.5) / beta).square(),
}
"""Other losses of DPO."""


class PairsConfig(ObjectiveConfig):
    """Base class of the options of objectives on pairs: adjacent rows, the chosen answer first."""

    needs = ("group",)
    headline = ("loss", "margin", "accuracy")

    @property
    def rows_together(self) -> int:
        return 2


class DpoConfig(PairsConfig):
    """Direct preference optimisation (2305.18290): log-probabilities relative to a reference.

    With the reward `r = beta · (log p - log p_reference)` of an answer and the margin `m` of a
    pair, the losses are:

    - `sigmoid`: `-log σ(m)` (2305.18290 eq. 7). With a label smoothing ε it is conservative DPO,
      `-(1 - ε) log σ(m) - ε log σ(-m)`.
    - `hinge`: `max(0, 1 - m)` (SLiC, 2305.10425, as 2309.06657 §3.2 relates it to DPO).
    - `ipo`: `(m / beta - 1 / (2 beta))²` (2310.12036 eq. 17, beta is its τ).
    - `robust`: `(-(1 - ε) log σ(m) + ε log σ(-m)) / (1 - 2 ε)`, unbiased if labels are wrong with
      the probability ε (2403.00409 §3).
    """

    kind: Literal["dpo"] = "dpo"
    needs = ("group", "reference")
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """The loss of a pair, see above."""
    beta: Scale = 0.1
    """Factor on the rewards; a larger one keeps the model closer to the reference."""
    label_smoothing: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0, lt=0.5)
    """Probability ε that the labels of a pair are exchanged; for `sigmoid` and `robust`."""
    per_token: bool = False
    """Divide the reward of an answer by its number of tokens, as the authors of IPO do in their
    experiments, and length-normalised DPO (Tülu 3, 2411.15124 §5.1.2)."""
    sft_weight: Weight = 0.0
    """Weight of the mean negative log-likelihood per token of each chosen answer, which is added to
    the loss of its pair (2404.19733 §2)."""

    def model_post_init(self, _context: object) -> None:
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} has no effect on loss={self.loss}; "
                "remove it"
            )

    def build(self, decoder: Decoder, team: Team = None) -> "Preference":
        if self.loss in SMOOTHED:
            loss = SMOOTHED[self.loss](self.label_smoothing)
        else:
            loss = partial(UNSMOOTHED[self.loss], beta=self.beta)
        rewards = partial(relative_reward, beta=self.beta, per_token=self.per_token)
        return Preference(decoder, rewards, loss, self.sft_weight, team=team)


class OrpoConfig(PairsConfig):
    """Odds-ratio preference optimisation (2403.07691 eq. 6): SFT and preferences in one.

    The loss of a pair is the mean negative log-likelihood per token of the chosen answer, plus
    `-beta · log σ(log odds(chosen) - log odds(rejected))`. The odds of an answer are `p / (1 - p)`,
    where log p is its mean log-probability per token.
    """

    kind: Literal["orpo"] = "orpo"
    beta: Scale = 0.1
    """Weight of the odds ratio's loss, λ in the paper."""

    def build(self, decoder: Decoder, team: Team = None) -> "Preference":
        loss = partial(sigmoid_loss, right=self.beta)
        return Preference(decoder, log_odds, loss, sft_weight=1.0, team=team)


class SimpoConfig(PairsConfig):
    """Simple preference optimisation (2405.14734 eq. 6), without a reference.

    The loss of a pair is `-log σ(m - gamma)`. The reward of an answer is beta times its mean
    log-probability per token.
    """

    kind: Literal["simpo"] = "simpo"
    beta: Scale = 2.0
    """Factor on the mean log-probabilities."""
    gamma: Weight = 1.0
    """Margin that the rewards of a pair should have. The paper recommends about half of beta."""
    sft_weight: Weight = 0.0
    """Weight of the mean negative log-likelihood per token of each chosen answer, which is added to
    the loss of its pair (CPO-SimPO)."""

    def build(self, decoder: Decoder, team: Team = None) -> "Preference":
        return Preference(
            decoder,
            lambda answers: self.beta * answers.mean,
            lambda margins: sigmoid_loss(margins - self.gamma),
            self.sft_weight,
            team=team,
        )


class AnswersObjective(ModelObjective):
    """Base class of objectives that use one log-probability per row."""

    def answers(self, batch: Batch) -> tuple[Answers, Tensor]:
        """Score the answers of a batch.

        Returns:
            The values of all rows, and a bool tensor (rows), True if a row counts because it has a
            target. The log-probability of other rows, such as padding of a validation batch, is 0.
        """
        logprobs = self.sequence_logprobs(batch)
        weights = self.sequence_weights(batch).to(logprobs.dtype)
        counted = weights > 0
        return Answers(logprobs, weights.where(counted, 1), batch.reference), counted


class Preference(AnswersObjective):
    """`Σ loss(reward of chosen - reward of rejected) - sft_weight · mean log p(chosen)` over pairs.

    The mean is over the tokens of the answer. Rows are adjacent: chosen, rejected.

    Args:
        decoder: the model to train.
        rewards: computes the rewards of answers, with a gradient.
        loss: computes the loss of each margin.
        sft_weight: weight of the likelihood of the chosen answers.
        team: see `Team`.
    """

    denominator = "groups"

    def __init__(
        self,
        decoder: Decoder,
        rewards: RewardFunction,
        loss: MarginLoss,
        sft_weight: float = 0.0,
        *,
        team: Team = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.rewards = rewards
        self.loss = loss
        self.sft_weight = sft_weight

    def forward(self, batch: Batch) -> Outcome:
        answers, counted = self.answers(batch)
        chosen, rejected = self.rewards(answers).view(-1, 2).unbind(dim=1)
        losses = self.loss(chosen - rejected) - self.sft_weight * answers.mean[0::2]
        logprobs = {"logp_chosen": answers.logprobs[0::2], "logp_rejected": answers.logprobs[1::2]}
        return outcome_of(losses, counted[0::2], pair_figures(chosen, rejected) | logprobs)


class KtoConfig(ObjectiveConfig):
    """Kahneman-Tversky optimisation (2402.01306 §4.1) on answers that are desirable or not.

    With the reward `r = log p - log p_reference` of an answer and a reference point z, the loss is
    `desirable_weight · σ(-beta (r - z))` of a desirable answer, and
    `undesirable_weight · σ(beta (r - z))` of an undesirable one.

    The paper and TRL estimate z, a KL divergence that has no gradient, from prompts with the
    answers of other prompts of the same micro-batch, so their loss depends on the choice of
    micro-batches. Here, z is `max(0, mean r)` over all answers in the batch of the step before, and
    0 in the first step. It costs no further passes.
    """

    kind: Literal["kto"] = "kto"
    needs = ("values", "reference")
    headline = ("loss", "reward_gain", "accuracy", "kl")
    beta: Scale = 0.1
    """Factor on the rewards; a larger one keeps the model closer to the reference."""
    desirable_weight: Weight = 1.0
    """Weight of desirable answers. The paper recommends weights such that the ratio of
    `weight · number of answers` of desirable to undesirable answers is between 1 and 3/2."""
    undesirable_weight: Weight = 1.0
    """Weight of undesirable answers."""
    kl: bool = True
    """True to estimate z. False: z is 0, which suits answers that are better and worse than the
    reference model's own (the unpaired form of APO-zero, 2408.06266)."""

    def build(self, decoder: Decoder, team: Team = None) -> "Kto":
        weights = self.desirable_weight, self.undesirable_weight
        return Kto(decoder, self.beta, weights, kl=self.kl, team=team)


class Kto(AnswersObjective):
    """`Σ weight · σ(± beta · (z - r))` over answers; see `KtoConfig`.

    Args:
        decoder: the model to train.
        beta: factor on the rewards.
        weights: weights of desirable and of undesirable answers.
        kl: True to estimate z; otherwise it is 0.
        team: see `Team`.

    Attributes:
        point: the reference point z.
    """

    denominator = "sequences"

    def __init__(
        self,
        decoder: Decoder,
        beta: float,
        weights: tuple[float, float] = (1.0, 1.0),
        *,
        kl: bool = True,
        team: Team = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.beta = beta
        self.weights = weights
        self.kl = kl
        self.point = 0.0
        self.forget()

    def forward(self, batch: Batch) -> Outcome:
        assert batch.values is not None
        answers, counted = self.answers(batch)
        rewards = relative_reward(answers)
        desirable = batch.values > 0
        gains = self.beta * (rewards - self.point) * torch.where(desirable, 1, -1)
        losses = (-gains).sigmoid()
        losses = (self.weights[0] * losses).where(desirable, self.weights[1] * losses)
        if self.training:
            sums = torch.stack([rewards.detach().where(counted, 0).sum(), counted.sum()]).double()
            self._sums = [self._sums[0] + sums] if self._sums else [sums]
        figures = {
            "reward": self.beta * rewards,
            "reward_gain": gains,
            "accuracy": (gains > 0).float(),
            "kl": torch.full_like(rewards, self.point),
        }
        return outcome_of(losses, counted, figures)

    def tallies(self) -> list[Tensor]:
        return self._sums

    def after_update(self, finite: bool) -> None:
        total, count = self._sums[0].tolist() if self._sums else (0.0, 0.0)
        if self.kl and finite and count:
            self.point = max(0.0, total / count)
        self.forget()

    def forget(self) -> None:
        self._sums: list[Tensor] = []
        """Sum of the rewards since the last update, and their number; empty if there are none."""

    def state(self) -> dict[str, Any]:
        return {"point": self.point}

    def load(self, state: dict[str, Any]) -> None:
        self.point = state.get("point", 0.0)


def relative_reward(answers: Answers, beta: float = 1.0, *, per_token: bool = False) -> Tensor:
    """`beta · (log p - log p_reference)` of each answer, divided by its length if `per_token`."""
    assert answers.reference is not None
    ratios = answers.logprobs - answers.reference
    return beta * (ratios / answers.weights if per_token else ratios)


def log_odds(answers: Answers) -> Tensor:
    """`log(p / (1 - p))` of each answer, where log p is its mean log-probability per token."""
    # An answer whose probability is rounded to 1 would have infinite odds.
    mean = answers.mean.clamp(max=-torch.finfo(answers.mean.dtype).eps)
    return mean - (-mean.expm1()).log()


def sigmoid_loss(margins: Tensor, right: float = 1.0, wrong: float = 0.0) -> Tensor:
    """`-right · log σ(margin) - wrong · log σ(-margin)`."""
    return -right * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)


def pair_figures(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Values of each pair to log, from the rewards of its answers."""
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
    }


def outcome_of(losses: Tensor, counted: Tensor, figures: dict[str, Tensor]) -> Outcome:
    """Sum losses and figures over the rows or pairs for which `counted` is True, all (rows)."""
    sums = {name: values.detach().where(counted, 0).sum() for name, values in figures.items()}
    return Outcome(losses.where(counted, 0).sum(), counted.sum(), sums)
