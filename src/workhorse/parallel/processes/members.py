"""What the processes of a team send each other."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from workhorse.parallel.processes.exchange import exchange_rows
from workhorse.parallel.processes.world import World

Change = Callable[[Tensor], Tensor]


def with_gradient(change: Change, back: Change, x: Tensor) -> Tensor:
    """What one function makes of a tensor; its gradient is what the other makes of the result's."""
    return cast(Tensor, _WithGradient.apply(x, change, back))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change, back: Change) -> Tensor:
        ctx.back = back
        return change(x)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(above[0]), None, None


class Members:
    """Processes that divide something.

    Args:
        world: they alone.

    Attributes:
        member: the number of this one, from 0.
        size: how many there are.
    """

    def __init__(self, world: World) -> None:
        self.member, self.size, self.group = world.rank, world.size, world.group

    def gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all members, which have one shape, in their order."""
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own.contiguous(), group=self.group)
        return gathered

    def exchange(self, parts: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """What the members send this one; see `exchange_rows`."""
        return exchange_rows(parts, sends, receives, self.group)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the members, which takes no gradient."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest that any member has, of each number."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, how, group=self.group)
        return result


class AbsentMembers(Members):
    """The last member of a team that is not there, for passes on tensors without data."""

    def __init__(self, size: int) -> None:
        super().__init__(World(size - 1, size))

    def gather(self, own: Tensor) -> list[Tensor]:
        return [torch.empty_like(own) for _ in range(self.size)]

    def exchange(self, parts: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        del sends
        return parts.new_empty(sum(receives), *parts.shape[1:])

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        del how
        return torch.empty_like(tensor)
