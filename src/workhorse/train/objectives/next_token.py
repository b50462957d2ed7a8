"""The next token's cross-entropy."""

from torch import Tensor

from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, HeadLoss
from workhorse.train.objectives.objective import Objective, Outcome


class NextToken(Objective):
    """`Σ -log p(target)` over what counts, in nats, and the z-loss while it is trained.

    Args:
        decoder: what is trained.
        z_loss: weight of the z-loss, see `next_token_loss`; a figure where there is one.
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.head_loss = HeadLoss()

    def count(self, batch: Batch) -> Tensor:
        return (batch.targets != IGNORE).sum()

    def forward(self, batch: Batch) -> Outcome:
        head = self.decoder.head
        matrix = self.head_loss.matrix(head)
        x = self.decoder.hidden(batch.tokens, documents=batch.documents)
        z_loss = self.z_loss if self.training else 0.0
        losses, count = self.head_loss(x, batch.targets, head, z_loss, matrix)
        cross_entropy, z = losses.detach().unbind()
        figures = {"loss": cross_entropy} | ({"z_loss": z} if z_loss else {})
        return Outcome(losses.sum(), count, figures)
