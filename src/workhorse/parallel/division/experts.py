"""Expert parallelism: the experts of mixtures divided among ranks, which exchange tokens.

A rank keeps the weights of its experts. It sends tokens that are routed to other experts to their
ranks, and gets the outputs back (2006.16668 §3). Tokens are sorted by expert, so the tokens for one
rank are contiguous.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from workhorse.nn.experts.mixture import Experts, GroupedLinear, Groups
from workhorse.optim.shards import is_sharded, local
from workhorse.parallel.processes.group import Group, with_gradient
from workhorse.parallel.processes.world import World
from workhorse.transforms.record import as_subclass, mixin_class, replace_modules


class ExpertParallelGroup:
    """The expert-parallel group: ranks that divide the experts of every mixture.

    Args:
        world: the processes of the run; all must create their group together.
        ways: number of ranks in a group, a divisor of `World.replicas`.
        device: the device of the weights.
    """

    def __init__(self, world: World, ways: int, device: torch.device) -> None:
        ranks = torch.arange(world.size).view(-1, ways, world.parallel.team)
        names = ("team", "expert", "member")
        self.mesh: DeviceMesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)["expert"]
        self.group = Group(self.mesh.get_local_rank(), ways, self.mesh.get_group())

    def owns(self, parameter: Tensor) -> bool:
        """True if a parameter belongs to divided experts."""
        return is_sharded(parameter) and parameter.device_mesh == self.mesh

    def divide(self, root: nn.Module) -> None:
        """Keep only this rank's experts of every mixture, in place."""

        def choose(module: nn.Module) -> nn.Module:
            if isinstance(module, GroupedLinear):
                made = as_subclass(module, mixin_class("Divided", _DividedLinear, type(module)))
                for name, weight in list(made.named_parameters(recurse=False)):
                    setattr(made, name, self._part(weight))
                return made
            if isinstance(module, Experts):
                kind = mixin_class("Divided", _DividedExperts, type(module))
                own = module.n_experts // self.group.size
                return as_subclass(module, kind, team=self, n_experts=own)
            return module

        replace_modules(root, choose)

    def _part(self, weight: nn.Parameter) -> nn.Parameter:
        own = weight.detach().chunk(self.group.size)[self.group.rank].clone()
        part = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
        return nn.Parameter(part, requires_grad=weight.requires_grad)


class _DividedLinear(GroupedLinear):
    """A mixin for the linear maps of divided experts."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return self.product(x, groups, local(self.weight), bias)


class _DividedExperts(Experts):
    """A mixin for divided experts; `n_experts` is the number of experts on this rank."""

    team: ExpertParallelGroup

    def of_sorted(self, rows: Tensor, experts: Tensor) -> Tensor:
        group, own = self.team.group, self.n_experts
        ways = group.size
        counts = torch.bincount(experts, minlength=ways * own).view(ways, own)
        arriving = group.exchange(counts)
        sends, receives = counts.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        there = partial(group.exchange, sends=sends, receives=receives)
        back = partial(group.exchange, sends=receives, receives=sends)
        arrived = with_gradient(there, back, rows)
        of_row = torch.arange(own, device=rows.device).repeat(ways)
        sorted_experts, order = of_row.repeat_interleave(arriving.flatten()).sort(stable=True)
        y = super().of_sorted(arrived[order], sorted_experts)
        y = torch.empty_like(y).index_copy_(0, order, y)
        return with_gradient(back, there, y)
