"""The loss on held-out text."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from workhorse.data import Split, ValidationBatches
from workhorse.data.config import Packing
from workhorse.parallel.processes.world import ALONE, World
from workhorse.train.objectives.objective import Objective, Outcome
from workhorse.train.step.precision import Precision


@dataclass(frozen=True)
class Validation:
    """The result of a validation on held-out text."""

    loss: float
    """Mean over predictions, nats."""
    bits_per_byte: float | None
    """`loss` in bits, times the number of tokens divided by the number of bytes of the text; None
    if that is not known. All tokens that training sees count, including eos and bos, predicted or
    not, which stand for no bytes. `workhorse.evaluate` leaves them out; see docs/evaluation.md."""
    unknown_rate: float
    """Share of the text's tokens that stand for characters unknown to the tokenizer. If there are
    any, the other figures flatter the model: it need not predict which characters they are."""
    tokens: int
    """Number of predictions."""


class Validator:
    """Measures the loss on a split, always on the same rows.

    Args:
        objective: its figure `loss` is measured.
        split: the held-out tokens.
        device: of the model.
        precision: makes the context that a forward pass runs in.
        seq_len: predictions per row.
        batch_size: rows per forward pass.
        packing: as in training.
        world: the processes that share the batches.
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
        world: World = ALONE,
    ) -> None:
        self.objective = objective
        self.split = split
        self.device = device
        self.precision = precision
        self.world = world
        self._sizes: dict[str, Any] = {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "packing": packing,
        }

    @torch.no_grad()
    def __call__(self, max_rows: int | None = None) -> Validation:
        """The loss without dropout, over the whole split or over `max_rows` rows evenly spread."""
        batches = ValidationBatches(self.split, **self._sizes, max_rows=max_rows)
        losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        counts = torch.zeros(len(batches), dtype=torch.int64, device=self.device)
        self.objective.eval()
        try:
            for number, counts_here in self.world.passes(len(batches)):
                rows = batches[number].to(self.device, non_blocking=True)
                with self.precision.products(), self.precision():
                    outcome: Outcome = self.objective(rows)
                if counts_here:
                    losses[number] = outcome.figures.get("loss", outcome.loss)
                    counts[number] = outcome.count
        finally:
            self.objective.train()
        for tensor in (losses, counts):  # 0 on all processes but those that passed it
            self.world.add_(tensor)
        tokens = int(counts.sum())
        mean = float(losses.cpu().sum()) / tokens
        return Validation(mean, self._bits_per_byte(mean), self.split.unknown_rate, tokens)

    def _bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte at this mean loss, counting the tokens between documents too."""
        if not self.split.n_bytes:
            return None
        return loss / math.log(2) * self.split.n_tokens / self.split.n_bytes
