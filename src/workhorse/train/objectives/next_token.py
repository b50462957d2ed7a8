"""The objective of language modelling: cross-entropy of the next token."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from workhorse.config.base import OnResume
from workhorse.data import Batch
from workhorse.nn import Decoder, HeadLoss
from workhorse.train.objectives.objective import ModelObjective, ObjectiveConfig, Outcome

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import ContextParallelGroup


class NextTokenConfig(ObjectiveConfig):
    """The cross-entropy of the next token, weighted by the weights in the data, if any."""

    kind: Literal["next_token"] = "next_token"
    z_loss: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0)
    """Weight of the z-loss, the squared log-partition function (PaLM, 2204.02311 §5), which is
    added to the loss. The reported loss is the cross-entropy without it."""

    def build(self, decoder: Decoder, team: "ContextParallelGroup | None" = None) -> "NextToken":
        return NextToken(decoder, self.z_loss, team)


class NextToken(ModelObjective):
    """`Σ -log p(target)` over all targets, in nats, plus the z-loss during training.

    Args:
        decoder: the model to train.
        z_loss: weight of the z-loss, see `next_token_loss`; the z-loss is logged unless this is 0.
        team: the context-parallel group: ranks that each have a part of the same sequences; None
            if sequences are not split.
    """

    def __init__(
        self, decoder: Decoder, z_loss: float = 0.0, team: "ContextParallelGroup | None" = None
    ) -> None:
        super().__init__(decoder, HeadLoss(), team)
        self.z_loss = z_loss

    def forward(self, batch: Batch) -> Outcome:
        z_loss = self.z_loss if self.training else 0.0
        losses, count = self.score(batch, z_loss=z_loss, weights=batch.weights)
        cross_entropy, z = losses.detach().unbind()
        figures = {"loss": cross_entropy} | ({"z_loss": z} if z_loss else {})
        return Outcome(losses.sum(), count, figures)
