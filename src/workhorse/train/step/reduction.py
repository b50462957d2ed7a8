"""The gradient of a batch whose rows are divided: among processes, or into parts of fixed shape."""

from collections.abc import Callable

import torch
from torch import Tensor

from workhorse.data.rows.permutation import derive
from workhorse.optim.master_weights import MasterWeights
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.exchange import add_exactly, add_fast
from workhorse.parallel.tree import Node, TreeSum
from workhorse.parallel.world import World

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
    """

    def __init__(
        self, world: World, config: ParallelismConfig, masters: MasterWeights, seed: int
    ) -> None:
        self.world, self.masters, self.seed = world, masters, seed
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
            torch.manual_seed(derive(self.seed, "part", step, part) % 2**63)
            figures = passes(part * rows // self.parts, (part + 1) * rows // self.parts)
            tensors = self.masters.take_gradients()
            tree.push(Node(0, part, [*tensors, torch.stack(list(figures.values())).float()]))
        if self.exact:
            *gradients, sums = add_exactly(self.world, tree, self.parts)
        else:
            *gradients, sums = tree.result()
            add_fast(self.world, [*gradients, sums])
        self.masters.put_gradients(gradients)
        return dict(zip(figures, sums.unbind(), strict=True))
