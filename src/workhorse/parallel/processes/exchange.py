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
    places = [nodes_of(share.start, share.stop) for share in shares]
    for buckets in zip(*map(_buckets, own), strict=True):
        nodes = torch.stack([_flat(bucket) for bucket in buckets])
        _spread(_sum_of_all(world, nodes, places), buckets[0])
    return own[0]


def _sum_of_all(world: World, nodes: Tensor, places: list[list[tuple[int, int]]]) -> Tensor:
    """The sum of the nodes of all processes.

    Args:
        world: of the run.
        nodes: (nodes, numbers) of this process.
        places: of each process, level and index of its nodes.
    """
    ways, (count, numbers) = world.size, nodes.shape
    part = -(-numbers // ways)
    padded = nodes.new_zeros(count, ways * part)
    padded[:, :numbers] = nodes
    sent = padded.view(count, ways, part).transpose(0, 1).contiguous()
    counts = [len(own) for own in places]
    rows = iter(world.exchange(sent.view(-1, part), [count] * ways, counts))
    tree = TreeSum(Node(level, index, [next(rows)]) for own in places for level, index in own)
    (total,) = tree.result()
    return world.gather(total).view(-1)[:numbers]


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
