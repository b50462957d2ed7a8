"""Sums of gradients over the processes: as the backend adds, or in a tree that is always the same.

Tensors travel in buckets, so that what is copied for it stays small.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.tree import Node, TreeSum, nodes_of
from workhorse.parallel.processes.world import World

BUCKET = 2**22
"""Numbers that travel at once, at least: 16 MiB in float32."""


def add_fast(group: Group, tensors: Sequence[Tensor]) -> None:
    """Add up tensors of one dtype over the processes, in place, in the backend's order."""
    if group.size == 1:
        return
    for bucket in _buckets(tensors):
        _spread(group.add_(_flat(bucket)), bucket)


def add_exactly(world: World, tree: TreeSum, leaves: int) -> list[Tensor]:
    """The sum of all leaves of a tree, of which each process has added up its `World.share`.

    Each process adds up one part of every tensor, from the nodes of all processes in the tree's
    order, and sends the sum to the others. So it sends what a ring would, once for each of its
    nodes; where the number of processes is a power of two that divides the leaves, it has one.

    Args:
        world: of the run.
        tree: of this process; its tensors are written over.
        leaves: of the whole tree, one for each process at least.
    """
    if world.size == 1:
        return tree.result()
    own = [node.tensors for node in tree.nodes]
    shares = [world.share(leaves, rank) for rank in range(world.size)]
    for buckets in zip(*map(_buckets, own), strict=True):
        _spread(_sum_of_all(world, buckets, shares), buckets[0])
    return own[0]


def _sum_of_all(world: World, nodes: Sequence[list[Tensor]], shares: Sequence[range]) -> Tensor:
    """The sum of the nodes of all processes, as one axis.

    Args:
        world: of the run.
        nodes: of this process, each the same tensors.
        shares: of each process, the leaves below its nodes.
    """
    ways, count = world.size, len(nodes)
    numbers = sum(tensor.numel() for tensor in nodes[0])
    part = -(-numbers // ways)
    padded = nodes[0][0].new_empty(count, ways * part)
    padded[:, numbers:] = 0
    for row, tensors in zip(padded, nodes, strict=True):
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=row[:numbers])
    total = own_sum(world, padded.view(count, ways, part).transpose(0, 1), shares)
    return world.gather(total).view(-1)[:numbers]


def own_sum(group: Group, nodes: Tensor, shares: Sequence[range]) -> Tensor:
    """What this process adds up of the nodes of all, in the tree's order.

    Args:
        group: the processes.
        nodes: (processes, nodes, numbers): of each node of this process, what each adds up.
        shares: of each process, the leaves below its nodes.
    """
    ways, count, numbers = nodes.shape
    places = [nodes_of(share.start, share.stop) for share in shares]
    counts = [len(own) for own in places]
    rows = iter(group.exchange(nodes.reshape(-1, numbers), [count] * ways, counts))
    tree = TreeSum(Node(level, index, [next(rows)]) for own in places for level, index in own)
    (total,) = tree.result()
    return total


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(one.numel() for one in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
