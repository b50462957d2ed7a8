"""The prefix cache: beginnings of texts, kept so that a text which begins alike can share them.

It is a tree. Each node is a block of tokens that follows the tokens of its parent, and holds the
blocks of the paged cache with their keys and values. When a text needs room, the least recently
used prefixes are evicted.
"""

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from workhorse.nn.cache.blocks import BLOCK, EMPTY, CachedText, Reach
from workhorse.nn.cache.paged import PagedCache

PIECE = 4 * BLOCK
"""Tokens of an exact text's prompt that are read in one pass; exact texts share whole pieces."""


@dataclass(eq=False)
class _Node:
    parent: "_Node | None" = None
    tokens: tuple[int, ...] = ()
    blocks: dict[Reach, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    in_order: list[tuple[int, ...]] = field(default_factory=list)
    """The children's tokens, sorted: the best match of other tokens is adjacent to their place."""


class PrefixTree:
    """The prefixes that a cache remembers.

    Args:
        cache: holds the blocks, and reclaims them when it is full.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._roots = {False: _Node(), True: _Node()}
        """By whether texts are exact: the bits of exact texts differ from those of others."""
        self._by_use: OrderedDict[_Node, None] = OrderedDict()
        """All nodes, least recently used first, and children before their parents."""
        cache.reclaim = self._reclaim

    def adopt(self, text: CachedText, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Give an empty text the longest remembered prefix of its tokens; returns the length.

        Args:
            text: the empty text.
            tokens: the tokens that it begins with.
            exact: whether it is exact; see `Reading.prompt`.
        """
        path, length = self._path(tokens, self._roots[exact])
        if exact:
            length = length // PIECE * PIECE
            path = path[: length // BLOCK]
        while length and not self._covers(path, length):  # a window has released some
            step = PIECE // BLOCK if exact else 1
            path = path[:-step]
            length = len(path) * BLOCK
        if length:
            reaches = self._cache.pools
            tables = {reach: [node.blocks[reach] for node in path] for reach in reaches}
            self._cache.adopt(text, length, tables)
            self._use(path)
        return length

    def remember(self, tokens: Sequence[int], text: CachedText, *, exact: bool = False) -> None:
        """Remember a text.

        Args:
            tokens: all tokens that it holds, or the first of them.
            text: holds their keys and values.
            exact: whether it is exact; see `Reading.prompt`.
        """
        node, path = self._roots[exact], list[_Node]()
        for number, start in enumerate(range(0, len(tokens), BLOCK)):
            part = tuple(tokens[start : start + BLOCK])
            child = node.children.get(part)
            if child is None:
                child = self._add(node, part, dict.fromkeys(text.tables, EMPTY))
            for reach, table in text.tables.items():
                if child.blocks[reach] == EMPTY:
                    child.blocks[reach] = self._cache.pools[reach].share(table[number])
            node = child
            path.append(node)
        self._use(path)

    def _path(self, tokens: Sequence[int], root: _Node) -> tuple[list[_Node], int]:
        """The nodes below a root that match the beginning of tokens, and how many tokens match."""
        node, path, length = root, list[_Node](), 0
        while length < len(tokens):
            rest = tuple(tokens[length : length + BLOCK])
            child = node.children.get(rest)
            agreed = len(rest)
            if child is None:
                at = bisect(node.in_order, rest)
                beside = node.in_order[max(at - 1, 0) : at + 1]
                agreed, tokens_of_child = max(
                    ((_agreed(other, rest), other) for other in beside), default=(0, ())
                )
                if not agreed:
                    break
                child = node.children[tokens_of_child]
            node, length = child, length + agreed
            path.append(node)
            if agreed < BLOCK:
                break
        return path, length

    def _covers(self, path: Sequence[_Node], length: int) -> bool:
        """Whether a path holds every block that the token after `length` tokens may see."""
        return all(
            path[number].blocks[reach] != EMPTY
            for reach in self._cache.pools
            for number in range(self._cache.first_seen(length, reach), len(path))
        )

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _add(self, parent: _Node, tokens: tuple[int, ...], blocks: dict[Reach, int]) -> _Node:
        """A new child, which replaces children that are prefixes of it."""
        for length in range(1, len(tokens)):
            if (shorter := parent.children.get(tokens[:length])) is not None:
                self._drop(shorter)
        child = parent.children[tokens] = _Node(parent, tokens, blocks)
        insort(parent.in_order, tokens)
        self._by_use[child] = None
        return child

    def _reclaim(self, reach: Reach) -> bool:
        """Evict the least recently used leaf; one that texts hold as well only as a last resort."""
        holders = self._cache.pools[reach].holders
        for _ in range(len(self._by_use)):
            node = next(iter(self._by_use))
            # An `EMPTY` block gives no room, but its node keeps its parents from being leaves.
            if not node.children and holders[node.blocks[reach]] <= 1:
                self._drop(node)
                return True
            self._by_use.move_to_end(node)  # in use, or the parent of a node that is
        ending = next((node for node in self._by_use if not node.children), None)
        if ending is not None:
            self._drop(ending)
        return ending is not None

    def _drop(self, node: _Node) -> None:
        for reach, block in node.blocks.items():
            self._cache.pools[reach].release(block)
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del node.parent.in_order[bisect(node.parent.in_order, node.tokens) - 1]
        del self._by_use[node]


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
