"""The teams that a process belongs to: those with other parts of its sequences, of its layers."""

from typing import NamedTuple

from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.layers import AbsentTensorTeam, TensorTeam
from workhorse.parallel.division.sequences import AbsentTeam, Team
from workhorse.parallel.processes.world import World


class Teams(NamedTuple):
    """The teams of a process; None where nothing is divided so."""

    sequences: Team | None = None
    layers: TensorTeam | None = None

    @property
    def tells(self) -> bool:
        """Whether this process counts what all that divide layers see."""
        return self.layers is None or self.layers.is_first


NO_TEAMS = Teams()


def make_teams(world: World, parallel: ParallelismConfig, vocabulary: int) -> Teams:
    """The teams of this process; all of the run must call it.

    Args:
        world: of the run. Processes that divide layers are neighbours, and so are teams of them
            that divide sequences.
        parallel: how many there are in each.
        vocabulary: tokens of the model.
    """
    sequences = layers = None
    tensor, team = parallel.tensor, parallel.team
    if parallel.context > 1:
        sequences = Team(world.alike(lambda rank: (rank // team, rank % tensor)))
    if tensor > 1:
        layers = TensorTeam(world.alike(lambda rank: rank // tensor), vocabulary)
    return Teams(sequences, layers)


def absent_teams(parallel: ParallelismConfig, vocabulary: int) -> Teams:
    """The same for passes on tensors without data, where there are no other processes."""
    return Teams(
        AbsentTeam(parallel.context) if parallel.context > 1 else None,
        AbsentTensorTeam(parallel.tensor, vocabulary) if parallel.tensor > 1 else None,
    )
