"""The next token's cross-entropy."""

from typing import TYPE_CHECKING

from torch import Tensor

from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, HeadLoss
from workhorse.nn.shapes import Hidden
from workhorse.train.objectives.objective import Objective, Outcome

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import SequenceTeam


class NextToken(Objective):
    """`Σ -log p(target)` over all targets, in nats, plus the z-loss during training.

    Args:
        decoder: the model to train.
        z_loss: weight of the z-loss, see `next_token_loss`; logged as a figure unless 0.
        team: has the other parts of the sequences, where these are divided.
    """

    def __init__(
        self, decoder: Decoder, z_loss: float = 0.0, team: "SequenceTeam | None" = None
    ) -> None:
        super().__init__()
        self.team = team
        self.decoder = decoder
        self.z_loss = z_loss
        self.logprobs = HeadLoss()

    def count(self, batch: Batch) -> Tensor:
        return (batch.targets != IGNORE).sum()

    def forward(self, batch: Batch) -> Outcome:
        head = self.decoder.head
        matrix = self.logprobs.matrix(head)
        x = self._hidden(batch)
        z_loss = self.z_loss if self.training else 0.0
        losses, count = self.logprobs(x, batch.targets, head, z_loss=z_loss, matrix=matrix)
        cross_entropy, z = losses.detach().unbind()
        figures = {"loss": cross_entropy} | ({"z_loss": z} if z_loss else {})
        return Outcome(losses.sum(), count, figures)

    def _hidden(self, batch: Batch) -> Hidden:
        if self.team is None:
            return self.decoder.hidden(batch.tokens, documents=batch.documents)
        view = self.team.view(self.decoder, batch.tokens, batch.documents)
        return self.decoder.hidden(batch.tokens, cache=view)
