"""Objectives of models and sequences that are divided among processes."""

from typing import TYPE_CHECKING

import torch

from workhorse.data import Batch
from workhorse.train.objectives.objective import Objective, Outcome, Wrapped

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import SequenceTeam


class CountedOnce(Wrapped):
    """Another objective, whose result all that divide a model see and one of them counts.

    Args:
        objective: of a model of which this process has a part.
        here: whether this process counts.
    """

    def __init__(self, objective: Objective, *, here: bool) -> None:
        super().__init__(objective)
        self.here = here

    def forward(self, batch: Batch) -> Outcome:
        loss, count, figures = self.objective(batch)
        if self.here:
            return Outcome(loss, count, figures)
        none = {name: torch.zeros_like(figure) for name, figure in figures.items()}
        return Outcome(loss - loss.detach(), torch.zeros_like(count), none)


class Divided(Wrapped):
    """Another objective, of this process's tokens of every row; it counts whole rows.

    Args:
        objective: of these tokens.
        team: has the others.
    """

    def __init__(self, objective: Objective, team: "SequenceTeam") -> None:
        super().__init__(objective)
        self.team = team

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(batch.columns(self.team.own(batch.tokens.shape[1])))
