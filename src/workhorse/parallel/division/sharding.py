"""FSDP2: weights, gradients and optimizer state sharded among ranks, block by block.

Each rank keeps its rows of every tensor (2304.11277; ZeRO stage 3, 1910.02054). PyTorch's
`fully_shard` gathers the weights of a block before they are used. After the block's backward pass
it reduces the gradients and scatters them to the ranks.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional

from workhorse.parallel.config import MicroBatches, ParallelismConfig
from workhorse.parallel.division.layers import ExpertParallelGroup
from workhorse.parallel.division.parts import Kind, ModelPart, kinds_of
from workhorse.parallel.processes.exchange import Node, TreeSum, own_sum
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.world import World
from workhorse.parallel.shards import is_sharded, local


def holders(
    parameters: Mapping[str, Tensor],
    world: World,
    parallel: ParallelismConfig,
    part: ModelPart | None,
    experts: ExpertParallelGroup | None,
    *,
    tied: bool = False,
) -> dict[Group, list[str]]:
    """Group parameters by the ranks that must sum their gradients.

    These ranks hold the same part of a parameter. FSDP itself sums over ranks with different rows
    of the batch, so with FSDP a group has only ranks with the same rows. All ranks of the run must
    call this function.

    Args:
        parameters: the parameters, by name.
        world: the processes of the run.
        parallel: the parallelism settings.
        part: this rank's part of the model; None if the rank has all layers undivided.
        experts: the expert-parallel group; None if experts are not divided.
        tied: True if the first and the last pipeline stage share the embedding table.

    Returns:
        The names of the parameters of each group.
    """
    divided = {name for name, own in parameters.items() if experts and experts.owns(own)}
    kinds = kinds_of(parameters, part, divided, tied=tied)
    found: dict[Group, list[str]] = {}
    for kind in _of_any(world, kinds, parallel):
        own = world.alike(partial(kind.part_of, parallel))
        if kind in kinds:
            found.setdefault(own, []).extend(kinds[kind])
    return found


def _of_any(world: World, own: Collection[Kind], parallel: ParallelismConfig) -> list[Kind]:
    """Return the kinds of parameters that any rank has, in the same order on all ranks.

    `own` contains the kinds of this rank's parameters.
    """
    ways = range(1, parallel.tensor + 1)
    every = [Kind(*one) for one in product((False, True), ways, (False, True))]
    here = world.gather(torch.tensor([kind in own for kind in every])).any(dim=0)
    return [kind for kind, there in zip(every, here.tolist(), strict=True) if there]


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelismConfig,
    device: torch.device,
    micro_batches: MicroBatches,
) -> "ExactSums | None":
    """Shard the weights of a module among the ranks, in place; all ranks must hold equal weights.

    A vector without a gradient, such as a router's selection bias, stays replicated. Parameters
    that are already divided are not changed.

    Args:
        root: the module that computes a pass. Its weights outside `blocks` stay gathered during
            the whole pass.
        blocks: modules inside `root`. Each is gathered separately and freed after each of its
            passes or at the end of the step (`config.reshard`). An embedding is gathered only for
            its forward pass.
        config: the parallelism settings.
        device: the device of the weights.
        micro_batches: the micro-batches of this rank in a step.

    Returns:
        If the reduction is exact, the object that sums the gradients. Otherwise None: FSDP sums
        them, in float32.
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
    """Context manager that gathers the weights outside the blocks, such as the head's.

    Inside it, submodules can be called directly, not only through `root`. All ranks must enter it.
    """
    if not isinstance(root, FSDPModule):  # only experts are divided
        yield
        return
    root.unshard()
    try:
        yield
    finally:
        reshard(root)


@contextmanager
def whole_weights(root: nn.Module) -> Generator[None]:
    """Context manager that gathers all weights of a sharded module.

    It is for code that uses the weights without FSDP's hooks. All ranks of the shard group must
    enter it. Until it ends, each rank holds all weights, in the dtype of the forward pass. Do not
    use the gathered tensors afterwards.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    try:
        yield
    finally:
        reshard(root)


def reshard(root: nn.Module) -> None:
    """Free the gathered weights of a sharded module; its parameters are this rank's rows again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _ByExchange(ReduceScatter):
    """Reduce-scatter by an all-to-all in the gradients' dtype and a local sum in float32.

    gloo implements reduce-scatter as an all-reduce, which sends twice as much and needs a copy.
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
        """Compute the gradient sum of this rank's rows.

        Args:
            output_tensor: is overwritten with the sum of this rank's rows.
            input_tensor: this rank's gradients of the rows of every rank, concatenated.
            group: the ranks.
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
    """Gradient sums in a fixed order, for `reduction: exact` with sharded weights.

    The gradients of a batch's parts are summed in a fixed tree. Each rank sums the rows of its
    shard.

    Args:
        groups: the modules returned by `fully_shard`.
        make: a function that creates the `_ExactSum` of one of these modules.
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
        """Return the gradient sums since the last call, by parameter.

        Each is in float32 and has only this rank's rows.
        """
        return {
            parameter: rows for group in self.groups for parameter, rows in group.take().items()
        }


class _ExactSum(_ByExchange):
    """The gradient sums of one module sharded by FSDP, which calls this instead of reduce-scatter.

    The ranks compute consecutive parts of the batch at the same time, one part each. After each
    micro-batch, a rank receives the gradients of its own rows from all ranks.

    Args:
        mesh: the mesh of `data` times `shard` ranks.
        passes: number of micro-batches in one part of the batch.
    """

    def __init__(self, mesh: DeviceMesh, passes: int) -> None:
        self.mesh, self.passes = mesh, passes
        self.passed = self.parts = 0
        self.tree = TreeSum()
        self.begun: Tensor | None = None
        """For the parts in progress, the gradient sums over their passes so far, in float32."""
        self.parameters: list[nn.Parameter] = []
        """The parameters, in the order of their rows in the exchanged buffer."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add the gradients of one pass; the last pass of a part completes the part.

        Args:
            output_tensor: the output, set to zero because the sums are not complete yet.
            input_tensor: this rank's gradients of the rows of each of `shard` ranks, concatenated.
            group: the ranks.
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
        """Exchange one pass's gradients and return those that this rank sums, in float32.

        Returns:
            (ranks, elements), the gradients computed by each rank.
        """
        sent = self._divided(gradients[None])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1))
        del sent
        return received.flatten(0, 1).float()

    def _add(self, whole: Tensor) -> None:
        """Add the gradients of complete parts, one part from each rank, to the sums."""
        for of_part in whole:
            self.tree.push(Node(0, self.parts, [of_part.clone()]))
            self.parts += 1

    def _divided(self, nodes: Tensor) -> Tensor:
        """Split gradients by the rank that sums them.

        `data` ranks hold the same rows of the weights; each of them sums a part of these rows.

        Args:
            nodes: (nodes, elements), nodes of the sum tree. Each has the rows of all `shard`
                ranks, concatenated.

        Returns:
            (ranks, nodes, elements), padded with zeros.
        """
        data, ways = self.mesh.shape
        rows = nodes.view(len(nodes), ways, -1)
        share = -(-rows.shape[2] // data)
        if fill := data * share - rows.shape[2]:
            rows = functional.pad(rows, (0, fill))
        return rows.view(-1, ways, data, share).permute(2, 1, 0, 3).flatten(0, 1).contiguous()

    def note(self, parameter: Tensor) -> None:
        """Append a parameter to `parameters` and free its gradient.

        FSDP calls this hook after each exchange, in the order of the parameters in the buffer.
        """
        parameter.grad = None
        self.parameters.append(cast(nn.Parameter, parameter))

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradient sums of this rank's rows, by parameter, and reset them to zero."""
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
            rows = -(-parameter.shape[0] // ways)  # FSDP pads the shards of the last ranks
            begin += rows * parameter.shape[1:].numel()
        self.parameters.clear()
        return taken


class _ExactSumOfStep(_ExactSum):
    """`_ExactSum` for `reshard: step`: sums are exchanged only once, at the end of the step.

    Each rank computes consecutive parts and holds the sums of unsharded gradients.

    Args:
        mesh: the mesh of `data` times `shard` ranks.
        passes: number of passes of one part.
        together: number of parts of the batch that each rank computes.
    """

    def __init__(self, mesh: DeviceMesh, passes: int, together: int) -> None:
        super().__init__(mesh, passes)
        self.together = together
        self.all = Group(dist.get_rank(), dist.get_world_size())

    def _taken(self, gradients: Tensor) -> Tensor:
        return gradients.float()  # float32 gradients need no copy: `allocate` made this buffer

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
            self.tree.push(Node(0, 0, [total.clone()]))  # the clone frees the exchange buffer


def _stays(parameter: nn.Parameter) -> bool:
    """True if FSDP must not shard a parameter: already divided, or a vector without a gradient."""
    return is_sharded(parameter) or (not parameter.requires_grad and parameter.ndim <= 1)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that are not in a separately sharded submodule."""
    inside = {
        parameter
        for part in module.modules()
        if part is not module and isinstance(part, FSDPModule)
        for parameter in part.parameters()
    }
    return [parameter for parameter in module.parameters() if parameter not in inside]
