"""Sums whose rounding does not depend on who adds what: a fixed tree over numbered summands.

The tree is binary. Its leaves are the summands 0, 1, 2 …; a node of level l and index i is the sum
of leaves i · 2^l to (i + 1) · 2^l - 1, as far as they exist, and always that of its two halves. A
process that has some consecutive leaves adds up whole nodes; whoever puts the nodes of all
processes together adds the rest, in the same order as one process that has all leaves.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Node(NamedTuple):
    """The sum of some consecutive summands, each a list of tensors.

    Attributes:
        level: 2^level leaves are below it, fewer only at the right edge of the tree.
        index: of the node among those of its level.
        tensors: the sums.
    """

    level: int
    index: int
    tensors: list[Tensor]


class TreeSum:
    """Adds up nodes that come in order from left to right, in place.

    Attributes:
        nodes: the sums so far, of which no two can be added without what comes later.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = []
        for node in nodes:
            self.push(node)

    def push(self, node: Node) -> None:
        """Take the next node, whose tensors now belong to the sum."""
        self.nodes.append(node)
        while len(self.nodes) > 1 and _are_halves(*self.nodes[-2:]):
            right = self.nodes.pop()
            left = self.nodes.pop()
            self.nodes.append(Node(left.level + 1, left.index // 2, _added(left, right)))

    def result(self) -> list[Tensor]:
        """The sum of all leaves; call it once, after the last.

        What is left are nodes of falling levels: the right edge of the tree, whose missing halves
        are empty.
        """
        assert self.nodes, "a sum of nothing"
        *others, total = self.nodes
        for node in reversed(others):
            total = Node(node.level + 1, node.index // 2, _added(node, total))
        self.nodes = [total]
        return total.tensors


def nodes_of(begin: int, end: int) -> list[tuple[int, int]]:
    """Level and index of the nodes that `TreeSum` leaves of the leaves `begin` to `end` - 1."""
    tree = TreeSum(Node(0, leaf, []) for leaf in range(begin, end))
    return [(node.level, node.index) for node in tree.nodes]


def _are_halves(left: Node, right: Node) -> bool:
    return left.level == right.level and left.index + 1 == right.index and right.index % 2 == 1


def _added(left: Node, right: Node) -> list[Tensor]:
    return [a.add_(b) for a, b in zip(left.tensors, right.tensors, strict=True)]
