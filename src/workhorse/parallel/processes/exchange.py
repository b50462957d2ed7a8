"""Sums of gradients over the processes: as the backend adds, or in a tree that is always the same.

Tensors travel in buckets, so that what is copied for it stays small. Also rows for one another.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workhorse.parallel.processes.tree import Node, TreeSum, nodes_of
from workhorse.parallel.processes.world import World

BUCKET = 2**22
"""Numbers that travel at once, at least: 16 MiB in float32."""


def add_fast(world: World, tensors: Sequence[Tensor]) -> None:
    """Add up tensors of one dtype over the processes, in place, in the backend's order."""
    if world.size == 1:
        return
    for bucket in _buckets(tensors):
        flat = _flat(bucket)
        world.add([flat])
        _spread(flat, bucket)


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
        total = _exchange(torch.stack([_flat(bucket) for bucket in buckets]), places)
        _spread(total, buckets[0])
    return own[0]


def exchange_rows(
    rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """The rows that the processes of a group send this one, in the order of their numbers.

    Args:
        rows: for each of them, one after the other.
        sends: how many for each.
        receives: how many from each.
        group: of processes.
    """
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


def _exchange(nodes: Tensor, places: list[list[tuple[int, int]]]) -> Tensor:
    """The sum of the nodes of all processes.

    Args:
        nodes: (nodes, numbers) of this process.
        places: of each process, level and index of its nodes.
    """
    ways, (count, numbers) = len(places), nodes.shape
    part = -(-numbers // ways)
    padded = nodes.new_zeros(count, ways * part)
    padded[:, :numbers] = nodes
    sent = padded.view(count, ways, part).transpose(0, 1).contiguous()
    counts = [len(own) for own in places]
    received = nodes.new_empty(sum(counts), part)
    dist.all_to_all_single(received, sent.view(-1, part), counts, [count] * ways)
    rows = iter(received)
    tree = TreeSum(Node(level, index, [next(rows)]) for own in places for level, index in own)
    (total,) = tree.result()
    whole = nodes.new_empty(ways * part)
    dist.all_gather(list(whole.view(ways, part)), total)
    return whole[:numbers]


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
