"""Conversions between sharded tensors (DTensors), this rank's shard of them, and whole tensors.

A rank updates only its own shard, so the optimizers compute with plain tensors. If a tensor is not
sharded, these functions treat the whole tensor as the shard and return their argument.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True if a tensor is a DTensor, so that this process may have only a shard of it."""
    module = sys.modules.get("torch.distributed.tensor")  # an import takes nearly a second
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, without copying it."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def placed_like(part: Tensor, other: Tensor) -> Tensor:
    """Make a sharded tensor from this rank's shard, with the shape and placement of `other`."""
    if not is_sharded(other):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(part, mesh, placements, shape=other.shape, stride=other.stride())


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor with the placement of `other`. Every rank must have the whole tensor."""
    if not is_sharded(other) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def summed_over_shards(value: Tensor, like: Tensor) -> Tensor:
    """Sum a value that each rank computed from its shard of `like`.

    A collective: all ranks must call it.
    """
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if place.is_shard() else Replicate() for place in like.placements]
    return DTensor.from_local(value, like.device_mesh, placements).full_tensor()


def whole_rows(figures: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Gather values that ranks computed for each row of their shards of several tensors.

    The values for all tensors are sent in one message.

    Args:
        figures: for each tensor, one value per row of this rank's shard.
        like: the tensors, all sharded by rows over the same ranks, or all unsharded.

    Returns:
        For each tensor, one value per row of the whole tensor.
    """
    first = like[0]
    assert len({is_sharded(tensor) for tensor in like}) == 1
    if not is_sharded(first):
        return list(figures)
    from torch.distributed.tensor import DTensor

    ways = first.device_mesh.size()
    most = [-(-len(tensor) // ways) for tensor in like]  # the last ranks may have fewer rows
    own = torch.cat(
        [functional.pad(one, (0, rows - len(one))) for one, rows in zip(figures, most, strict=True)]
    )
    shape, stride = torch.Size((ways, len(own))), (len(own), 1)
    mesh, placements = first.device_mesh, first.placements
    of_all = DTensor.from_local(own[None], mesh, placements, shape=shape, stride=stride)
    parts = of_all.full_tensor().split(most, dim=1)
    return [part.flatten()[: len(tensor)] for part, tensor in zip(parts, like, strict=True)]


def whole_stack(parts: Tensor, member: Tensor) -> Tensor:
    """Gather whole tensors from their shards; all tensors have one shape and placement.

    Args:
        parts: (tensors, …), this rank's shards, stacked.
        member: any of the tensors, or another one with their shape and placement.
    """
    if not is_sharded(member):
        return parts
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(parts), *member.shape))
    stride = torch.empty(shape, device="meta").stride()
    placements = _below_a_stack(member)
    stack = DTensor.from_local(parts, member.device_mesh, placements, shape=shape, stride=stride)
    return stack.full_tensor()


def part_of_stack(stack: Tensor, member: Tensor) -> Tensor:
    """Return this rank's shards of stacked whole tensors; the inverse of `whole_stack`."""
    if not is_sharded(member):
        return stack
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = member.device_mesh, _below_a_stack(member)
    return distribute_tensor(stack, mesh, placements, src_data_rank=None).to_local()


def _below_a_stack(member: "DTensor") -> "list[Placement]":
    from torch.distributed.tensor import Shard

    return [
        Shard(place.dim + 1) if isinstance(place, Shard) else place for place in member.placements
    ]
