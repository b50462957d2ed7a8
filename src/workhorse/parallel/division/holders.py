"""Which processes have a share each of a parameter's gradient, to be added up."""

from collections.abc import Hashable, Mapping
from functools import partial

from torch import Tensor

from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.experts import ExpertTeam
from workhorse.parallel.division.part import ModelPart
from workhorse.parallel.processes.world import World


def holders(
    parameters: Mapping[str, Tensor],
    world: World,
    parallel: ParallelismConfig,
    part: ModelPart | None,
    experts: ExpertTeam | None,
) -> dict[World, list[str]]:
    """The names of the parameters whose gradients the processes of each world add up.

    They are those that have the same part of the parameter; if FSDP divides it, which adds up by
    itself, those that have also the same rows. All processes of the run must call it.

    Args:
        parameters: by name.
        world: of the run.
        parallel: how it is divided.
        part: of the model that this process has; None: all layers are whole.
        experts: the processes that divide experts, if they are divided.
    """
    kinds: dict[tuple[bool, int], list[str]] = {}
    for name, parameter in parameters.items():
        of_experts = experts is not None and experts.owns(parameter)
        ways = 1 if part is None else part.cuts[name].ways
        kinds.setdefault((of_experts, ways), []).append(name)
    found: dict[World, list[str]] = {}
    for (of_experts, ways), names in sorted(kinds.items()):
        own = world.alike(partial(_part_of, parallel, of_experts, ways))
        found.setdefault(own, []).extend(names)
    return found


def _part_of(parallel: ParallelismConfig, of_experts: bool, ways: int, rank: int) -> Hashable:
    """What a process has of a parameter."""
    team, member = divmod(rank, parallel.tensor)
    of_layers = member * ways // parallel.tensor
    if of_experts:
        return of_layers, rank // parallel.team % parallel.expert
    return (of_layers, team) if parallel.shard > 1 else of_layers
