"""The objective of language modelling: cross-entropy of the next token, also of conversations."""

from typing import Literal

from workhorse.data import Batch
from workhorse.nn import Decoder, HeadLoss, TokenLogprobs
from workhorse.train.objectives.objective import (
    ModelObjective,
    ObjectiveConfig,
    Outcome,
    Team,
    Weight,
    target_weights,
)


class NextTokenConfig(ObjectiveConfig):
    """The cross-entropy of the next token, weighted if the data has weights.

    With conversations this is supervised fine-tuning (SFT): only their learned tokens have a
    weight. The denominator is the sum of the weights in the whole batch.
    """

    kind: Literal["next_token"] = "next_token"
    loss_unit = "nats per token"
    z_loss: Weight = 0.0
    """Weight of the z-loss, the squared log-partition function (PaLM, 2204.02311 §5), which is
    added to the loss. The reported loss is the cross-entropy without it."""
    dft: bool = False
    """Multiply the loss of each token by its probability, without a gradient through the factor:
    dynamic fine-tuning (2508.05629). The reported loss is the cross-entropy."""

    def build(self, decoder: Decoder, team: Team = None) -> "NextToken | DynamicFineTuning":
        return (DynamicFineTuning if self.dft else NextToken)(decoder, self.z_loss, team)


class NextToken(ModelObjective):
    """`Σ -log p(target)` over all targets, in nats, plus the z-loss during training.

    Args:
        decoder: the model to train.
        z_loss: weight of the z-loss, see `next_token_loss`; the z-loss is logged unless this is 0.
        team: see `Team`.
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0, team: Team = None) -> None:
        super().__init__(decoder, HeadLoss(), team)
        self.z_loss = z_loss

    def forward(self, batch: Batch) -> Outcome:
        z_loss = self.z_loss if self.training else 0.0
        losses, count = self.score(batch, z_loss=z_loss, weights=batch.weights)
        cross_entropy, z = losses.detach().unbind()
        figures = {"loss": cross_entropy} | ({"z_loss": z} if z_loss else {})
        return Outcome(losses.sum(), count, figures)


class DynamicFineTuning(ModelObjective):
    """`Σ -p(target) · log p(target)`, in nats, where the factor p has no gradient.

    Paper: 2508.05629.

    Args:
        decoder: the model to train.
        z_loss: weight of the z-loss, as for `NextToken`; it is not multiplied by the probability.
        team: see `Team`.
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0, team: Team = None) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.z_loss = z_loss

    def forward(self, batch: Batch) -> Outcome:
        scores, weights = self.score(batch), target_weights(batch)
        z_loss = self.z_loss if self.training else 0.0
        losses = -(scores.target * scores.target.detach().exp() * weights).sum()
        z = z_loss * (scores.logsumexp.square() * weights).sum()
        cross_entropy = -(scores.target.detach() * weights).sum()
        figures = {"loss": cross_entropy, "dft_loss": losses.detach()}
        figures |= {"z_loss": z.detach()} if z_loss else {}
        return Outcome(losses + z, self.count(batch), figures)
