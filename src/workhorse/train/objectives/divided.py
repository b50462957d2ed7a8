"""An objective of sequences of which each process has a part."""

from typing import TYPE_CHECKING

from workhorse.data import Batch
from workhorse.train.objectives.objective import Objective, Outcome, Wrapped

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import SequenceTeam


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
