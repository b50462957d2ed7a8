"""An objective of sequences of which each process has a part."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from workhorse.data import Batch
from workhorse.train.objectives.objective import Objective, Outcome

if TYPE_CHECKING:
    from workhorse.parallel.sequences import Team


class Divided(Objective):
    """Another objective, of this process's tokens of every row.

    Args:
        objective: of these tokens.
        team: has the others.
    """

    def __init__(self, objective: Objective, team: "Team") -> None:
        super().__init__()
        self.objective = objective
        self.team = team

    def count(self, batch: Batch) -> Tensor:
        """Over whole rows."""
        return self.objective.count(batch)

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(batch.columns(self.team.own(batch.tokens.shape[1])))

    def tallies(self) -> list[Tensor]:
        return self.objective.tallies()

    def after_update(self, finite: bool) -> None:
        self.objective.after_update(finite)

    def forget(self) -> None:
        self.objective.forget()

    def state_of_update(self) -> dict[str, Any]:
        return self.objective.state_of_update()
