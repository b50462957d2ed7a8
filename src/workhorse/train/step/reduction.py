"""The gradient of a batch whose rows are divided: among processes, or into parts of fixed shape."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workhorse.data.rows.permutation import derive
from workhorse.optim.master_weights import MasterWeights
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.exchange import add_exactly, add_fast
from workhorse.parallel.tree import Node, TreeSum
from workhorse.parallel.world import World

if TYPE_CHECKING:
    from workhorse.parallel.experts import ExpertTeam
    from workhorse.parallel.sharding import ExactSums

Passes = Callable[[int, int], dict[str, Tensor]]
"""Leaves the gradient of the rows from one number to another, and returns sums to be logged."""


class Reduction:
    """Adds up the gradients of a batch's parts, of which each process computes its share.

    With `exact` the parts are the same on any number of processes, and so is the order in which
    they are added; dropout depends on the part alone. With `fast` every process has one part.

    Args:
        world: of the run.
        config: how to add.
        masters: hold the gradients.
        seed: of the run.
        experts: the processes among which experts are divided, if they are.
    """

    def __init__(
        self,
        world: World,
        config: ParallelismConfig,
        masters: MasterWeights,
        seed: int,
        *,
        experts: "ExpertTeam | None" = None,
    ) -> None:
        self.world, self.masters, self.seed = world, masters, seed
        self.experts = experts
        self.exact = config.is_exact
        self.parts = config.parts

    def __call__(self, step: int, rows: int, passes: Passes) -> dict[str, Tensor]:
        """The sums to be logged of all rows, whose gradient is then that of the parameters.

        Args:
            step: its number.
            rows: of the batch.
            passes: computes the gradient of some of them.
        """
        tree = TreeSum()
        figures: dict[str, Tensor] = {}
        for part in self.world.share(self.parts):
            figures = self.pass_part(step, part, rows, passes)
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
        """Add up what all processes have, and of experts what those with the same ones have."""
        if self.experts is None:
            add_fast(self.world, [*gradients, sums])
            return
        owned = [self.experts.owns(weight) for weight in self.masters.parameters.values()]
        of_all = [one for one, own in zip(gradients, owned, strict=True) if not own]
        of_experts = [one for one, own in zip(gradients, owned, strict=True) if own]
        add_fast(self.world, [*of_all, sums])
        add_fast(self.experts.replicas, of_experts)

    def pass_part(self, step: int, part: int, rows: int, passes: Passes) -> dict[str, Tensor]:
        """Leave the gradient of one part of a batch of so many rows; returns sums to be logged."""
        who = [self.world.member] if self.world.team > 1 else []
        torch.manual_seed(derive(self.seed, "part", step, part, *who) % 2**63)
        return passes(part * rows // self.parts, (part + 1) * rows // self.parts)


class ShardedReduction(Reduction):
    """The same where each process keeps its share of every gradient, which FSDP sends it.

    Processes compute in step: in every round each has one part.

    Args:
        exact_sums: adds them up; None: FSDP does.
    """

    def __init__(
        self,
        world: World,
        config: ParallelismConfig,
        masters: MasterWeights,
        seed: int,
        *,
        exact_sums: "ExactSums | None",
        experts: "ExpertTeam | None" = None,
    ) -> None:
        super().__init__(world, config, masters, seed, experts=experts)
        self.exact_sums = exact_sums

    def __call__(self, step: int, rows: int, passes: Passes) -> dict[str, Tensor]:
        world = self.world
        sums, figures = TreeSum(), dict[str, Tensor]()
        for first in range(0, self.parts, world.teams):
            figures = self.pass_part(step, first + world.rank // world.team, rows, passes)
            if self.exact_sums is not None:
                self.exact_sums.end_part()
            of_all = world.gather(torch.stack(list(figures.values())).float())
            for number, of_process in enumerate(of_all, first * world.team):
                sums.push(Node(0, number, [of_process]))
        if self.exact_sums is not None:
            taken = self.exact_sums.take()
            self.masters.put_gradients(taken[one] for one in self.masters.parameters.values())
        if (experts := self.experts) is not None:  # which FSDP does not know
            self.masters.change_gradients(experts.owns, partial(add_fast, experts.replicas))
        (total,) = sums.result()
        return dict(zip(figures, total.unbind(), strict=True))
