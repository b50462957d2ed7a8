"""The next token's cross-entropy."""

from torch import Tensor, nn

from workhorse.nn import Decoder, HeadLoss


class LossOfBatch(nn.Module):
    """Decoder and loss as one module, whose forward is what gets sharded."""

    def __init__(self, decoder: Decoder, z_loss: float = 0.0) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.head_loss = HeadLoss()

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The summed losses in nats and how many targets count.

        Args:
            tokens: (batch, seq).
            targets: (batch, seq), `IGNORE` where none counts.
            documents: (batch, seq) or None; see `Decoder.forward`.

        Returns:
            Cross-entropy and z-loss, (2,), whose sum is to be made less; and the count.
        """
        head = self.decoder.head
        matrix = self.head_loss.matrix(head)
        x = self.decoder.hidden(tokens, documents=documents)
        z_loss = self.z_loss if self.training else 0.0
        return self.head_loss(x, targets, head, z_loss, matrix)
