"""Weights, gradients and optimizer state divided among processes, block by block: FSDP2.

Each process keeps its rows of every tensor (2304.11277; ZeRO stage 3, 1910.02054). PyTorch's
`fully_shard` gathers the weights of a block before they are used and sends each process its part of
their gradients after the block's backward pass.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional

from workhorse.optim.shards import is_sharded, local
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.processes.tree import Node, TreeSum


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelismConfig,
    device: torch.device,
    passes: int,
) -> "ExactSums | None":
    """Divide the weights of a module among the processes, in place; all must hold the same.

    A vector that takes no gradient, as a router's selection bias, stays whole on each process, and
    what is divided already stays as it is.

    Args:
        root: called for every pass; it gathers what is in no block, for the whole of a pass.
        blocks: of it, which are gathered one at a time, and kept so if `config.reshard` says it;
            an embedding for its forward pass, since the backward pass needs no weights.
        config: into how many parts, and how many processes have each of them.
        device: of the weights.
        passes: forward and backward passes that one part of a batch takes.

    Returns:
        What adds up the gradients if that is to be exact; otherwise FSDP has them added in float32.
    """
    shape = config.pipeline, config.data, config.shard * config.context, config.tensor
    names = "pipeline", "data", "shard", "tensor"
    every = init_device_mesh(device.type, shape, mesh_dim_names=names)
    mesh = every["data", "shard"]
    by_exchange = config.adds_by_exchange(device.type)
    ignored = {parameter for parameter in root.parameters() if _stays(parameter)}
    divide = partial(
        fully_shard,
        mesh=mesh["shard"] if config.is_exact or config.data == 1 else mesh,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=None if by_exchange else torch.float32),
        ignored_params=ignored,
        reshard_after_forward=None if config.reshard == "pass" else False,
    )
    groups = [cast(FSDPModule, divide(module)) for module in (*blocks, root)]
    for group in groups:
        group.set_reshard_after_backward(config.reshard == "pass", recurse=False)
        group.set_unshard_in_backward(not isinstance(group, nn.Embedding))
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        if by_exchange and not config.is_exact:
            group.set_custom_reduce_scatter(_ByExchange())
    return ExactSums(groups, mesh, passes) if config.is_exact else None


@contextmanager
def gathered(root: nn.Module) -> Generator[None]:
    """Hold what is in no block whole, for calls of parts of a sharded module by all processes."""
    if not isinstance(root, FSDPModule):  # experts alone are divided
        yield
        return
    root.unshard()
    try:
        yield
    finally:
        reshard(root)


def reshard(root: nn.Module) -> None:
    """Free what is gathered of a sharded module, so that its parameters are this process's rows."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _ByExchange(ReduceScatter):
    """Adds up in float32 what processes send each other once, in the dtype that it has.

    gloo's own reduce-scatter is an all-reduce: it sends twice as much, and of a copy.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the sum of this process's rows.

        Args:
            output_tensor: of them.
            input_tensor: the rows of each process of the group, one after the other.
            group: these processes.
            op: a sum; not used.
            async_op: not used.
        """
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.view(-1, len(output_tensor))
        total = first.float()
        for rows in others:
            total += rows
        output_tensor.copy_(total)


class ExactSums:
    """Adds up the gradients of a batch's parts in a fixed tree, each process its rows of them.

    In one round every process passes one part of the batch, in the order of their numbers.

    Args:
        groups: what `fully_shard` made of modules.
        mesh: of `data` times `shard` processes.
        passes: of a process in a round.
    """

    def __init__(self, groups: Iterable[FSDPModule], mesh: DeviceMesh, passes: int) -> None:
        self.groups: list[_ExactSum] = []
        for group in groups:
            sums = _ExactSum(mesh, passes)
            group.set_custom_reduce_scatter(sums)
            module = cast(nn.Module, group)
            for parameter in _own_parameters(module):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(sums.note)
            self.groups.append(sums)

    def take(self) -> dict[nn.Parameter, Tensor]:
        """This process's rows of the sums since the last call, in float32, by parameter."""
        return {
            parameter: rows for group in self.groups for parameter, rows in group.take().items()
        }


class _ExactSum(_ByExchange):
    """The sums of the parameters that are gathered together: what FSDP calls to reduce them."""

    def __init__(self, mesh: DeviceMesh, passes: int) -> None:
        self.mesh, self.passes = mesh, passes
        self.passed = self.parts = 0
        self.tree = TreeSum()
        self.received: Tensor | None = None
        """This process's rows of the parts that all processes have begun to pass, in float32."""
        self.parameters: list[nn.Parameter] = []
        """In the order in which their rows follow one another."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange the gradients of one pass for all processes' of some rows.

        Each process gets the rows that it keeps; where several keep the same, a share of them each.

        Args:
            output_tensor: written with zeros: the sums are not there yet.
            input_tensor: the rows of each of `shard` processes, one after the other.
            group: these processes.
            op: a sum; not used.
            async_op: not used.
        """
        data, ways = self.mesh.shape
        share = -(-len(output_tensor) // data)
        fill = data * share - len(output_tensor)
        sent = functional.pad(input_tensor.view(ways, -1), (0, fill)) if fill else input_tensor
        sent = sent.view(ways, data, share).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1))
        del sent  # memory is at its fullest here
        rows = received.view(-1, share).float()
        del received
        self._add(rows if self.received is None else self.received.add_(rows))
        output_tensor.zero_()
        self.parameters.clear()

    def _add(self, rows: Tensor) -> None:
        """Add to the sums what one pass left of the parts, after which they may be whole."""
        self.passed += 1
        self.received = rows
        if self.passed == self.passes:
            for of_part in rows:
                self.tree.push(Node(0, self.parts, [of_part.clone()]))
                self.parts += 1
            self.received, self.passed = None, 0

    def note(self, parameter: Tensor) -> None:
        """Called for each parameter in turn, after the exchange."""
        parameter.grad = None
        self.parameters.append(cast(nn.Parameter, parameter))

    def take(self) -> dict[nn.Parameter, Tensor]:
        data, ways = self.mesh.shape
        (share,) = self.tree.result()
        self.tree, self.parts = TreeSum(), 0
        flat = share
        if data > 1:
            flat = share.new_empty(data * len(share))
            dist.all_gather(list(flat.view(data, -1)), share, group=self.mesh.get_group("data"))
        taken: dict[nn.Parameter, Tensor] = {}
        begin = 0
        for parameter in self.parameters:
            part = local(parameter)
            taken[parameter] = flat[begin : begin + part.numel()].view(part.shape)
            rows = -(-parameter.shape[0] // ways)  # the last processes' parts are filled up
            begin += rows * parameter.shape[1:].numel()
        self.parameters.clear()
        return taken


def _stays(parameter: nn.Parameter) -> bool:
    """Whether FSDP leaves a parameter as it is."""
    return is_sharded(parameter) or (not parameter.requires_grad and parameter.ndim <= 1)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that belong to a group and not to one inside it."""
    inside = {
        parameter
        for part in module.modules()
        if part is not module and isinstance(part, FSDPModule)
        for parameter in part.parameters()
    }
    return [parameter for parameter in module.parameters() if parameter not in inside]
