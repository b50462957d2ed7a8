"""Which processes have a share each of a parameter's gradient, to be added up."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.cuts import TIED_TABLE, ModelPart
from workhorse.parallel.division.experts import ExpertTeam
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.world import World


def holders(
    parameters: Mapping[str, Tensor],
    world: World,
    parallel: ParallelismConfig,
    part: ModelPart | None,
    experts: ExpertTeam | None,
    *,
    tied: bool = False,
) -> dict[Group, list[str]]:
    """The names of the parameters whose gradients the processes of each group add up.

    They are those that have the same part of the parameter; if FSDP divides it, which adds up by
    itself, those that have also the same rows. All processes of the run must call it.

    Args:
        parameters: by name.
        world: of the run.
        parallel: how it is divided.
        part: of the model that this process has; None: all layers are whole.
        experts: the processes that divide experts, if they are divided.
        tied: whether the first of several stages and the last have the same table.
    """
    kinds: dict[_Kind, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        kind = _Kind(
            of_experts=experts is not None and experts.owns(parameter),
            ways=1 if part is None else part.cuts[name].ways,
            tied=tied and name == TIED_TABLE,
        )
        kinds[kind].append(name)
    found: dict[Group, list[str]] = {}
    for kind in _of_any(world, kinds, parallel):
        own = world.alike(partial(_part_of, parallel, kind))
        if kind in kinds:
            found.setdefault(own, []).extend(kinds[kind])
    return found


class _Kind(NamedTuple):
    """What decides who has the same part of a parameter."""

    of_experts: bool
    """Routed ones, which processes divide."""
    ways: int
    """Into how many different parts the parameter is divided; see `Cut.ways`."""
    tied: bool
    """The first stage and the last have it."""


def _of_any(world: World, own: Collection[_Kind], parallel: ParallelismConfig) -> list[_Kind]:
    """The kinds that some process has, in an order that all agree on."""
    ways = range(1, parallel.tensor + 1)
    every = [_Kind(*one) for one in product((False, True), ways, (False, True))]
    here = world.gather(torch.tensor([kind in own for kind in every])).any(dim=0)
    return [kind for kind, there in zip(every, here.tolist(), strict=True) if there]


def _part_of(parallel: ParallelismConfig, kind: _Kind, rank: int) -> Hashable:
    """What a process has of a parameter."""
    at = parallel.coordinates(rank)
    stage = 0 if kind.tied and at.pipeline == parallel.pipeline - 1 else at.pipeline
    of_layers = at.tensor * kind.ways // parallel.tensor
    if kind.of_experts:
        return stage, of_layers, parallel.replica(rank) % parallel.expert
    rows = (at.data, at.shard, at.context) if parallel.shard > 1 else ()
    return stage, of_layers, rows
