"""All-reduce of gradients, by the backend or in a fixed order.

The fixed order is a binary tree. Its leaves are the summands 0, 1, 2 …. The node with level l and
index i is the sum of the leaves i · 2^l to (i + 1) · 2^l - 1 that exist, computed as the sum of its
two halves. A rank with consecutive leaves sums complete nodes. The nodes of all ranks are then
summed in the same order in which one process would sum all leaves.

Tensors are copied to buckets and sent one bucket at a time, so that the copies need little memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.world import World


class Node(NamedTuple):
    """The sum of consecutive summands, each a list of tensors.

    Attributes:
        level: the level in the tree. A node has 2^level leaves; the last of a level may have fewer.
        index: the index of the node in its level.
        tensors: the sums.
    """

    level: int
    index: int
    tensors: list[Tensor]


class TreeSum:
    """Sums nodes in order from left to right, in place.

    Attributes:
        nodes: the sums so far. They cannot be added to each other before later nodes arrive.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = []
        for node in nodes:
            self.push(node)

    def push(self, node: Node) -> None:
        """Add the next node; the sum takes ownership of its tensors and overwrites them."""
        self.nodes.append(node)
        while len(self.nodes) > 1 and _are_halves(*self.nodes[-2:]):
            right = self.nodes.pop()
            left = self.nodes.pop()
            self.nodes.append(Node(left.level + 1, left.index // 2, _added(left, right)))

    def result(self) -> list[Tensor]:
        """The sum of all leaves; call it once, after the last leaf.

        If the number of leaves is not a power of two, some subtrees still wait for their right
        half, which is empty. Their sums are added from the smallest subtree to the largest.
        """
        assert self.nodes, "there are no leaves to sum"
        *others, total = self.nodes
        for node in reversed(others):
            total = Node(node.level + 1, node.index // 2, _added(node, total))
        self.nodes = [total]
        return total.tensors


def nodes_of(begin: int, end: int) -> list[tuple[int, int]]:
    """Level and index of the nodes in a `TreeSum` of the leaves `begin` to `end` - 1."""
    tree = TreeSum(Node(0, leaf, []) for leaf in range(begin, end))
    return [(node.level, node.index) for node in tree.nodes]


def _are_halves(left: Node, right: Node) -> bool:
    return left.level == right.level and left.index + 1 == right.index and right.index % 2 == 1


def _added(left: Node, right: Node) -> list[Tensor]:
    return [a.add_(b) for a, b in zip(left.tensors, right.tensors, strict=True)]


BUCKET = 2**22
"""Minimum number of elements in a full bucket: 16 MiB in float32."""


def add_fast(group: Group, tensors: Sequence[Tensor]) -> None:
    """All-reduce tensors of one dtype over a group, in place, summed in the backend's order."""
    if group.size == 1:
        return
    for bucket in buckets(tensors):
        _spread(group.add_(_flat(bucket)), bucket)


def add_exactly(world: World, tree: TreeSum, leaves: int) -> list[Tensor]:
    """Sum the trees of all ranks in a fixed order, and return the sum on every rank.

    Each rank first sums the leaves of its `World.share` in `tree`. Then it sums one part of every
    tensor over the nodes of all ranks, in the tree's order, and sends this sum to the others. For
    each of its nodes, a rank sends as much as in a ring all-reduce. It has one node if the number
    of ranks is a power of two that divides the number of leaves.

    Args:
        world: the processes of the run.
        tree: this rank's tree; its tensors are overwritten.
        leaves: number of leaves of the whole tree, at least one per rank.
    """
    if world.size == 1:
        return tree.result()
    own = [node.tensors for node in tree.nodes]
    shares = [world.share(leaves, rank) for rank in range(world.size)]
    for nodes in zip(*map(buckets, own), strict=True):
        _spread(_sum_of_all(world, nodes, shares), nodes[0])
    return own[0]


def _sum_of_all(world: World, nodes: Sequence[list[Tensor]], shares: Sequence[range]) -> Tensor:
    """The sum of the nodes of all ranks, as a flat tensor.

    Args:
        world: the processes of the run.
        nodes: this rank's nodes, each a list of the same tensors.
        shares: for each rank, the leaves below its nodes.
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
    """Sum this rank's part of the nodes of all ranks, in the tree's order.

    Args:
        group: the ranks.
        nodes: (ranks, nodes, elements), this rank's nodes, split by the rank that sums each part.
        shares: for each rank, the leaves below its nodes.
    """
    ways, count, numbers = nodes.shape
    places = [nodes_of(share.start, share.stop) for share in shares]
    counts = [len(own) for own in places]
    rows = iter(group.exchange(nodes.reshape(-1, numbers), [count] * ways, counts))
    tree = TreeSum(Node(level, index, [next(rows)]) for own in places for level, index in own)
    (total,) = tree.result()
    return total


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Split a list of tensors into the buckets that are sent one at a time."""
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
