"""Reward models: the Bradley-Terry loss of pairs of answers.

The reward of an answer is the logit of one token at the position that predicts the answer's last
target. So this token's row of the head is the weight of a scalar head, and a reward model is
divided among ranks and exported like any other model. The token should have no other use.
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, TokenLogprobs
from workhorse.train.objectives.objective import ModelObjective, Outcome, Team, Weight
from workhorse.train.objectives.preferences import PairsConfig, outcome_of, pair_figures


class RewardConfig(PairsConfig):
    """A reward model: `-log σ(r_chosen - r_rejected - margin)` of each pair.

    The margins are those of the data, 0 by default (Llama 2, 2307.09288 §3.2.2 eq. 2).
    """

    kind: Literal["reward"] = "reward"
    needs = ("group", "values")
    token: int = Field(ge=0)
    """Id of the token whose logit is the reward. Choose one that no text contains."""
    centre: Weight = 0.0
    """Weight of `(r_chosen + r_rejected)²`, which keeps the mean reward near 0 (2312.09244 eq. 2;
    0.01 is a usual value)."""

    def build(self, decoder: Decoder, team: Team = None) -> "BradleyTerry":
        if self.token >= decoder.config.vocab_size:
            raise ConfigError(
                f"token={self.token} is not in a vocabulary of {decoder.config.vocab_size} tokens; "
                "choose a smaller id",
                "train.objective",
            )
        return BradleyTerry(decoder, self.token, self.centre, team)


class BradleyTerry(ModelObjective):
    """`Σ -log σ(r_chosen - r_rejected - margin) + centre · (r_chosen + r_rejected)²` over pairs.

    Args:
        decoder: the model to train.
        token: id of the token whose logit is the reward.
        centre: weight of the squared sum of the rewards.
        team: see `Team`.
    """

    denominator = "groups"

    def __init__(
        self,
        decoder: Decoder,
        token: int,
        centre: float = 0.0,
        team: Team = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.token = token
        self.centre = centre

    def forward(self, batch: Batch) -> Outcome:
        assert batch.values is not None
        rewards, counted = self.rewards(batch)
        chosen, rejected = rewards.view(-1, 2).unbind(dim=1)
        losses = -F.logsigmoid(chosen - rejected - batch.values[0::2])
        losses = losses + self.centre * (chosen + rejected).square()
        return outcome_of(losses, counted[0::2], pair_figures(chosen, rejected))

    def rewards(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the reward of each row, and whether it has a target; both (rows).

        The reward is computed from all tokens up to the one before the last target.
        """
        seq = batch.targets.shape[1]
        positions = torch.arange(seq, device=batch.targets.device)
        if self.team is not None:  # this rank has the columns from rank · seq
            positions = positions + self.team.group.rank * seq
        last = positions.where(batch.targets != IGNORE, -1).amax(dim=1)
        if self.team is not None:
            last = self.team.group.largest(last)
        targets = torch.where(positions == last[:, None], self.token, IGNORE)
        scores = self.score(replace(batch, targets=targets))
        logits = scores.target + scores.logsumexp  # both are 0 at other positions
        return self.over_sequences(logits.sum(dim=1)), last >= 0
