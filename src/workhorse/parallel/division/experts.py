"""The experts of mixtures divided among processes, which send each other tokens.

A process keeps the weights of its experts and sends the tokens that are routed to others', whose
outputs come back (2006.16668 §3). Tokens are sorted by expert, so what goes to one process lies
together.
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
from workhorse.transforms.record import become, combined, replace_modules


class ExpertTeam:
    """The processes that have a part each of every mixture's experts.

    Args:
        world: of the run; all its processes must make their team together.
        ways: how many processes are in a team; it divides the number of `World.replicas`.
        device: of the weights.
    """

    def __init__(self, world: World, ways: int, device: torch.device) -> None:
        ranks = torch.arange(world.size).view(-1, ways, world.parallel.team)
        names = ("team", "expert", "member")
        self.mesh: DeviceMesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)["expert"]
        self.group = Group(self.mesh.get_local_rank(), ways, self.mesh.get_group())

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is of experts, of which this process has a part."""
        return is_sharded(parameter) and parameter.device_mesh == self.mesh

    def divide(self, root: nn.Module) -> None:
        """Let this process keep its part of every mixture's experts, in place."""

        def choose(module: nn.Module) -> nn.Module:
            if isinstance(module, GroupedLinear):
                made = become(module, combined("Divided", _DividedLinear, type(module)))
                for name, weight in list(made.named_parameters(recurse=False)):
                    setattr(made, name, self._part(weight))
                return made
            if isinstance(module, Experts):
                kind = combined("Divided", _DividedExperts, type(module))
                own = module.n_experts // self.group.size
                return become(module, kind, team=self, n_experts=own)
            return module

        replace_modules(root, choose)

    def _part(self, weight: nn.Parameter) -> nn.Parameter:
        own = weight.detach().chunk(self.group.size)[self.group.rank].clone()
        part = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
        return nn.Parameter(part, requires_grad=weight.requires_grad)


class _DividedLinear(GroupedLinear):
    """A mixin for the maps of experts of which this process has a part."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return self.product(x, groups, local(self.weight), bias)


class _DividedExperts(Experts):
    """A mixin for experts of which this process has a part: `n_experts` of them."""

    team: ExpertTeam

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
