"""Gradient of a batch whose parts are computed separately, by several ranks or one by one."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workhorse.data.sampling import derive
from workhorse.optim.master_weights import MasterWeights
from workhorse.parallel.config import ParallelismConfig, share_of
from workhorse.parallel.processes.exchange import Node, TreeSum, add_exactly, add_fast
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.world import World

if TYPE_CHECKING:
    from workhorse.parallel.division.sharding import ExactSums

PassRows = Callable[[int, int], dict[str, Tensor]]
"""A function that accumulates the gradient of rows `begin` to `end` and returns sums to log."""

Holders = Mapping[Group, Sequence[str]]


class Reduction:
    """Adds up the gradients of the parts of a batch. Each rank computes its share of the parts.

    With `reduction: exact`, the parts and the order of summation are the same on any number of
    processes, and dropout depends only on the part. With `reduction: fast`, every rank has one
    part.

    Args:
        world: the processes of the run.
        config: the settings of parallelism, with the kind of reduction.
        masters: the master weights, which hold the gradients.
        seed: the seed of the run.
        holders: for each process group, the names of the parameters whose gradients it adds up;
            None: all processes add up all gradients.
    """

    def __init__(
        self,
        world: World,
        config: ParallelismConfig,
        masters: MasterWeights,
        seed: int,
        *,
        holders: Holders | None = None,
    ) -> None:
        self.world, self.masters, self.seed = world, masters, seed
        self.holders = {world: list(masters.parameters)} if holders is None else holders
        self.exact = config.is_exact
        self.parts = config.parts

    def __call__(self, step: int, rows: int, pass_rows: PassRows) -> dict[str, Tensor]:
        """Compute the gradient of the whole batch and store it on the parameters.

        Args:
            step: the number of the step.
            rows: the number of rows in the batch.
            pass_rows: function that computes the gradient of a range of rows.

        Returns:
            Sums to log over all rows of the batch, by name.
        """
        tree = TreeSum()
        figures: dict[str, Tensor] = {}
        for part in self.world.share(self.parts):
            figures = self.pass_part(step, part, rows, pass_rows)
            tensors = self.masters.take_gradients()
            tree.push(Node(0, part, [*tensors, torch.stack(list(figures.values())).float()]))
        if self.exact:
            *gradients, sums = add_exactly(self.world, tree, self.parts)
        else:
            *gradients, sums = tree.result()
            self._add_fast(gradients, sums)
        self.masters.put_gradients(gradients)
        return dict(zip(figures, sums.unbind(), strict=True))

    def _add_fast(self, gradients: list[Tensor], sums: Tensor) -> None:
        """Sum gradients over their parameters' process groups, and values to log over all ranks."""
        named = dict(zip(self.masters.parameters, gradients, strict=True))
        shared = {group: [named[name] for name in names] for group, names in self.holders.items()}
        shared.setdefault(self.world, []).append(sums)
        for group, tensors in shared.items():
            add_fast(group, tensors)

    def pass_part(self, step: int, part: int, rows: int, pass_rows: PassRows) -> dict[str, Tensor]:
        """Compute the gradient of the part with index `part` of a batch; see `__call__`.

        Returns:
            Sums to log over the rows of this part, by name.
        """
        alone = self.world.replicas == self.world.size
        # Ranks with the same rows need different dropout, so the seed includes the rank's index.
        who = [] if alone else [self.world.member]
        torch.manual_seed(derive(self.seed, "part", step, part, *who) % 2**63)
        own = share_of(rows, self.parts, part)
        return pass_rows(own.start, own.stop)


class ShardedReduction(Reduction):
    """Reduction for FSDP, where each rank keeps its shard of every gradient.

    The parts of a batch are assigned to the ranks in turn. With `reshard: step` a rank has
    consecutive parts instead, so it can add them up locally.

    Args:
        exact_sums: adds up the gradients; None if FSDP adds them up.
        reshard: function that frees the weights that passes have gathered.
    """

    def __init__(
        self,
        world: World,
        config: ParallelismConfig,
        masters: MasterWeights,
        seed: int,
        *,
        exact_sums: "ExactSums | None",
        reshard: Callable[[], None],
        holders: Holders,
    ) -> None:
        super().__init__(world, config, masters, seed, holders=holders)
        self.exact_sums, self.reshard = exact_sums, reshard
        self.consecutive = config.reshard == "step"

    def __call__(self, step: int, rows: int, pass_rows: PassRows) -> dict[str, Tensor]:
        world = self.world
        replica = world.parallel.replica(world.rank)
        every = range(replica, self.parts, world.replicas)
        figures: dict[str, Tensor] = {}
        told: list[Tensor] = []
        for part in world.share(self.parts) if self.consecutive else every:
            figures = self.pass_part(step, part, rows, pass_rows)
            told.append(world.gather(torch.stack(list(figures.values())).float()))
        of_parts = torch.stack(told, dim=1 if self.consecutive else 0).flatten(0, 1)
        sums = TreeSum(Node(0, number, [row]) for number, row in enumerate(of_parts))
        self.reshard()
        if self.exact_sums is not None:
            taken = self.exact_sums.take()
            self.masters.put_gradients(taken[one] for one in self.masters.parameters.values())
        for group, names in self.holders.items():  # FSDP does not know these groups
            if group.size > 1:
                self.masters.change_gradients(names, partial(add_fast, group))
        (total,) = sums.result()
        return dict(zip(figures, total.unbind(), strict=True))
