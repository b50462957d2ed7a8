"""Sums in a fixed tree do not depend on the division of the summands among ranks."""

import itertools

import pytest
import torch
from torch import Tensor

from workhorse.parallel.config import share_of
from workhorse.parallel.processes.exchange import Node, TreeSum, nodes_of


def summands(count: int) -> list[Tensor]:
    """Float32 summands with a sum that depends on the order."""
    generator = torch.Generator().manual_seed(count)
    sizes = 10.0 ** torch.randint(-4, 4, (count, 1), generator=generator)
    return list(torch.randn(count, 50, generator=generator) * sizes)


def recursive(leaves: list[Tensor], begin: int, size: int) -> Tensor | None:
    """The sum of a node's leaves, by the definition of the tree."""
    if begin >= len(leaves):
        return None
    if size == 1:
        return leaves[begin]
    left, right = (recursive(leaves, begin + half, size // 2) for half in (0, size // 2))
    assert left is not None
    return left if right is None else left + right


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 13])
def test_any_division_gives_the_same_bits(count: int) -> None:
    leaves = summands(count)
    expected = recursive(leaves, 0, 16)
    assert expected is not None
    for ways in range(1, count + 1):
        whole = TreeSum()
        for rank in range(ways):
            share = share_of(count, ways, rank)
            own = TreeSum(Node(0, leaf, [leaves[leaf].clone()]) for leaf in share)
            assert [node[:2] for node in own.nodes] == nodes_of(share.start, share.stop)
            for node in own.nodes:
                whole.push(node)
        (total,) = whole.result()
        assert torch.equal(total, expected)
    exact = torch.stack(leaves).double().sum(dim=0)
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-3)


def test_the_order_of_the_summands_shows() -> None:
    """The sum depends on the order, so the previous test can detect a wrong order."""
    leaves = summands(8)
    plain = torch.stack(list(itertools.accumulate(leaves)))[-1]
    assert not torch.equal(plain, recursive(leaves, 0, 8))


@pytest.mark.parametrize("ways", [1, 2, 3, 7])
def test_shares_are_all_and_even(ways: int) -> None:
    shares = [list(share_of(7, ways, rank)) for rank in range(ways)]
    assert list(itertools.chain(*shares)) == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
