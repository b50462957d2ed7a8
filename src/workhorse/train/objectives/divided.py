"""Objectives of models and sequences that are divided among processes."""

from typing import TYPE_CHECKING

import torch

from workhorse.data import Batch
from workhorse.train.objectives.objective import Objective, Outcome, Wrapped

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import SequenceTeam
    from workhorse.parallel.division.teams import Teams


class CountedElsewhere(Wrapped):
    """Another objective, whose result another process of a team counts; here it has gradients."""

    def forward(self, batch: Batch) -> Outcome:
        loss, count, figures = self.objective(batch)
        none = {name: torch.zeros_like(figure) for name, figure in figures.items()}
        return Outcome(loss - loss.detach(), torch.zeros_like(count), none)


def counts_here(objective: Objective, teams: "Teams") -> bool:
    """Whether this process counts an objective's result, which all of a team see.

    Predictions are counted by whoever has them, sequences and groups once for all their parts.
    """
    team = teams.sequences
    first = team is None or team.group.is_first
    return teams.has_loss and (first or objective.denominator == "tokens")


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
