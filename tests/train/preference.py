"""A preference objective on pairs of rows, the first preferred: an example of a new objective."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, TokenLogprobs
from workhorse.parallel.division.sequences import ContextParallelGroup
from workhorse.train.objectives.objective import ModelObjective, ObjectiveConfig, Outcome


class PreferenceConfig(ObjectiveConfig):
    kind: Literal["preference"] = "preference"
    needs = ("group",)

    @property
    def rows_together(self) -> int:
        return 2

    def build(self, decoder: Decoder, team: ContextParallelGroup | None = None) -> "Preference":
        return Preference(decoder, team)


class Preference(ModelObjective):
    """`-log sigmoid(mean log p(chosen) - mean log p(rejected))`, summed over pairs.

    With a reference, log-probabilities are relative to the frozen model (DPO).
    """

    denominator = "groups"

    def __init__(
        self,
        decoder: Decoder,
        team: ContextParallelGroup | None = None,
        reference: Decoder | None = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.reference = (reference,)
        self.ends: list[bool] = []

    def forward(self, batch: Batch) -> Outcome:
        scores = self.means(self, batch)
        (reference,) = self.reference
        if reference is not None:
            with torch.no_grad():
                before = self.means(Preference(reference), batch)
            scores = scores - before
        margins = scores[0::2] - scores[1::2]
        right = (margins.detach() > 0).float().sum()
        figures = {"margin": margins.detach().sum(), "accuracy": right}
        return Outcome(-F.logsigmoid(margins).sum(), self.count(batch), figures)

    def means(self, model: ModelObjective, batch: Batch) -> Tensor:
        counted = self.over_sequences((batch.targets != IGNORE).sum(dim=1).float())
        return self.over_sequences(model.score(batch).target.sum(dim=1)) / counted.clamp(min=1)

    def after_update(self, finite: bool) -> None:
        self.ends.append(finite)
