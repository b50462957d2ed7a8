"""FSDP2: weights, gradients and optimizer state sharded among ranks, block by block.

Each process keeps its rows of every tensor (2304.11277; ZeRO stage 3, 1910.02054). PyTorch's
`fully_shard` gathers the weights of a block before they are used and sends each process its part of
their gradients after the block's backward pass.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional

from workhorse.optim.shards import is_sharded, local
from workhorse.parallel.config import MicroBatches, ParallelismConfig
from workhorse.parallel.division.experts import ExpertTeam
from workhorse.parallel.division.parts import TIED_TABLE, ModelPart
from workhorse.parallel.processes.exchange import Node, TreeSum, own_sum
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


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelismConfig,
    device: torch.device,
    micro_batches: MicroBatches,
) -> "ExactSums | None":
    """Divide the weights of a module among the processes, in place; all must hold the same.

    A vector that takes no gradient, as a router's selection bias, stays whole on each process, and
    what is divided already stays as it is.

    Args:
        root: called for every pass; what is in no block is gathered for the whole of a pass.
        blocks: parts of `root`, each gathered by itself, and freed after each of its passes or at
            the end of the step (`config.reshard`). An embedding is gathered for its forward pass
            only.
        config: into how many parts, and how many processes have each of them.
        device: of the weights.
        micro_batches: of this process in a step.

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
    if not config.is_exact:
        return None
    if config.reshard == "step":
        return ExactSums(
            groups, partial(_ExactSumOfStep, mesh, micro_batches.passes, micro_batches.parts)
        )
    return ExactSums(groups, partial(_ExactSum, mesh, micro_batches.passes))


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


@contextmanager
def whole_weights(root: nn.Module) -> Generator[None]:
    """Hold all weights of a sharded module whole, for bodies that share them and have no hooks.

    All processes of the shard group must enter. Each holds a copy of all weights, in the dtype of
    the passes, until the context ends; whatever shares them must not be used afterwards.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
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

    Args:
        groups: what `fully_shard` made of modules.
        make: what adds up those of one group.
    """

    def __init__(self, groups: Iterable[FSDPModule], make: "Callable[[], _ExactSum]") -> None:
        self.groups: list[_ExactSum] = []
        for group in groups:
            sums = make()
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
    """The sums of the parameters that are gathered together: what FSDP calls to reduce them.

    In each round every process passes one part of the batch, in the order of their numbers, and
    after each pass gets of all processes the rows that it keeps.

    Args:
        mesh: of `data` times `shard` processes.
        passes: that one part takes.
    """

    def __init__(self, mesh: DeviceMesh, passes: int) -> None:
        self.mesh, self.passes = mesh, passes
        self.passed = self.parts = 0
        self.tree = TreeSum()
        self.begun: Tensor | None = None
        """The sum over the passes so far, in float32, of the parts that are begun."""
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
        """Take the gradients of one pass, after which a part may be whole.

        Args:
            output_tensor: written with zeros: the sums are not there yet.
            input_tensor: the rows of each of `shard` processes, one after the other.
            group: these processes.
            op: a sum; not used.
            async_op: not used.
        """
        taken = self._taken(input_tensor)
        self.begun = taken if self.begun is None else self.begun.add_(taken)
        del taken  # memory is at its fullest here
        self.passed += 1
        if self.passed == self.passes:
            whole, self.begun, self.passed = self.begun, None, 0
            self._add(whole)
        output_tensor.zero_()
        self.parameters.clear()

    def _taken(self, gradients: Tensor) -> Tensor:
        """What is kept of one pass's gradients, in float32: here (processes, numbers)."""
        sent = self._divided(gradients[None])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1))
        del sent
        return received.flatten(0, 1).float()

    def _add(self, whole: Tensor) -> None:
        """Add a whole part, here one of each process, to the sums."""
        for of_part in whole:
            self.tree.push(Node(0, self.parts, [of_part.clone()]))
            self.parts += 1

    def _divided(self, nodes: Tensor) -> Tensor:
        """What each process adds up of some nodes: the rows that it keeps.

        Where several keep the same rows, each has a share of them.

        Args:
            nodes: (nodes, numbers), the rows of each of `shard` processes, one after the other.

        Returns:
            (processes, nodes, numbers), filled up with zeros.
        """
        data, ways = self.mesh.shape
        rows = nodes.view(len(nodes), ways, -1)
        share = -(-rows.shape[2] // data)
        if fill := data * share - rows.shape[2]:
            rows = functional.pad(rows, (0, fill))
        return rows.view(-1, ways, data, share).permute(2, 1, 0, 3).flatten(0, 1).contiguous()

    def note(self, parameter: Tensor) -> None:
        """Called for each parameter in turn, after the exchange."""
        parameter.grad = None
        self.parameters.append(cast(nn.Parameter, parameter))

    def take(self) -> dict[nn.Parameter, Tensor]:
        """The sums of this process's rows, by parameter, after which a new step begins."""
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


class _ExactSumOfStep(_ExactSum):
    """The same where each process adds up its parts before any are exchanged, once a step.

    Each process passes consecutive parts, and holds the sums of whole gradients.

    Args:
        mesh: of `data` times `shard` processes.
        passes: that one part takes.
        together: parts of a process.
    """

    def __init__(self, mesh: DeviceMesh, passes: int, together: int) -> None:
        super().__init__(mesh, passes)
        self.together = together
        self.all = Group(dist.get_rank(), dist.get_world_size())

    def _taken(self, gradients: Tensor) -> Tensor:
        return gradients.float()  # in float32 what `allocate` gave, which nobody else writes to

    def _add(self, whole: Tensor) -> None:
        shares = [
            range(rank * self.together, (rank + 1) * self.together) for rank in range(self.all.size)
        ]
        self.tree.push(Node(0, shares[self.all.rank][self.parts], [whole]))
        self.parts += 1
        if self.parts == self.together:
            nodes = torch.stack([node.tensors[0] for node in self.tree.nodes])
            self.tree = TreeSum()
            total = own_sum(self.all, self._divided(nodes), shares)
            self.tree.push(Node(0, 0, [total.clone()]))  # without what was received beside it


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
