"""The loss on held-out text."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from workhorse.data import Split, ValidationBatches
from workhorse.data.config import Packing
from workhorse.train.objectives.objective import Objective, Outcome
from workhorse.train.step.precision import Precision


@dataclass(frozen=True)
class Validation:
    """What held-out text says."""

    loss: float
    """Mean over predictions, nats."""
    bits_per_byte: float | None
    """`loss` in bits, times the tokens of the text over its bytes; None where the bytes are not
    known. Tokens are all that training sees: eos and bos count, predicted or not, and no bytes
    stand against them. `workhorse.evaluate` leaves them out; see docs/evaluation.md."""
    unknown_rate: float
    """Share of the text's tokens that stand for characters which the tokenizer does not have. Where
    there are any, the other figures flatter the model: it was not asked which characters they
    are."""
    tokens: int
    """Predictions."""


class Validator:
    """Measures the loss on a split, always on the same rows.

    Args:
        objective: whose figure `loss` is measured.
        split: held out.
        device: where the rows go.
        precision: makes the contexts that the forward pass runs in.
        seq_len: predictions in a row.
        batch_size: rows that pass through at once.
        packing: as in training.
    """

    def __init__(
        self,
        objective: Objective,
        split: Split,
        device: torch.device,
        *,
        precision: Precision,
        seq_len: int,
        batch_size: int,
        packing: Packing,
    ) -> None:
        self.objective = objective
        self.split = split
        self.device = device
        self.precision = precision
        self._sizes: dict[str, Any] = {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "packing": packing,
        }

    @torch.no_grad()
    def __call__(self, max_rows: int | None = None) -> Validation:
        """The loss, dropout off, over the whole split or over rows spread evenly over it."""
        losses, counts = [], []
        self.objective.eval()
        try:
            for batch in ValidationBatches(self.split, **self._sizes, max_rows=max_rows):
                rows = batch.to(self.device, non_blocking=True)
                with self.precision.products(), self.precision():
                    outcome: Outcome = self.objective(rows)
                losses.append(outcome.figures.get("loss", outcome.loss))
                counts.append(outcome.count)
        finally:
            self.objective.train()
        tokens = int(torch.stack(counts).sum())
        mean = float(torch.stack(losses).cpu().double().sum()) / tokens
        return Validation(mean, self._bits_per_byte(mean), self.split.unknown_rate, tokens)

    def _bits_per_byte(self, loss: float) -> float | None:
        """The split's tokens, those between documents included, at this mean loss."""
        if not self.split.n_bytes:
            return None
        return loss / math.log(2) * self.split.n_tokens / self.split.n_bytes
