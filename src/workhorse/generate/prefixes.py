"""What texts in a cache begin with, so that others which begin alike need not be read again.

A tree: each node is a block of tokens after those of its parent, and holds the blocks of the cache
where their keys and values lie. What nobody used for the longest time is let go when a text needs
its room.
"""

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from workhorse.nn.cache.blocks import BLOCK, EMPTY, CachedText, Reach
from workhorse.nn.cache.paged import PagedCache

PIECE = 4 * BLOCK
"""Tokens of an exact text's prompt that are read at a time, and shared with other exact texts."""


@dataclass(eq=False)
class _Node:
    parent: "_Node | None" = None
    tokens: tuple[int, ...] = ()
    blocks: dict[Reach, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    in_order: list[tuple[int, ...]] = field(default_factory=list)
    """Their tokens in order: those that agree longest with others stand next to these."""


class PrefixTree:
    """The beginnings that a cache remembers.

    Args:
        cache: whose blocks they are; it may take them back.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._roots = {False: _Node(), True: _Node()}
        """Of all texts but the exact ones, and of these, whose bits may differ."""
        self._by_use: OrderedDict[_Node, None] = OrderedDict()
        """All nodes, the one used longest ago first, and children before their parents."""
        cache.reclaim = self._reclaim

    def adopt(self, text: CachedText, tokens: Sequence[int], *, exact: bool = False) -> int:
        """Let an empty text hold what is known of its beginning; how many tokens that is.

        Args:
            text: to fill.
            tokens: that it begins with.
            exact: see `Reading.prompt`.
        """
        path, length = self._path(tokens, self._roots[exact])
        if exact:
            length = length // PIECE * PIECE
            path = path[: length // BLOCK]
        while length and not self._covers(path, length):  # a window let go of what would be seen
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
        """Keep what a text holds.

        Args:
            tokens: all that it has consumed, or the first ones.
            text: where they lie.
            exact: see `Reading.prompt`.
        """
        node, path = self._roots[exact], list[_Node]()
        for number, start in enumerate(range(0, len(tokens), BLOCK)):
            some = tuple(tokens[start : start + BLOCK])
            child = node.children.get(some)
            if child is None:
                child = self._add(node, some, dict.fromkeys(text.tables, EMPTY))
            for reach, table in text.tables.items():
                if child.blocks[reach] == EMPTY:
                    child.blocks[reach] = self._cache.pools[reach].share(table[number])
            node = child
            path.append(node)
        self._use(path)

    def _path(self, tokens: Sequence[int], root: _Node) -> tuple[list[_Node], int]:
        """The nodes below a root that begin as the tokens do, and how many tokens agree."""
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
        """Whether all is there that the token after `length` may see."""
        return all(
            path[number].blocks[reach] != EMPTY
            for reach in self._cache.pools
            for number in range(self._cache.first_seen(length, reach), len(path))
        )

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _add(self, parent: _Node, tokens: tuple[int, ...], blocks: dict[Reach, int]) -> _Node:
        """A new child, in the place of those that it begins with."""
        for length in range(1, len(tokens)):
            if (shorter := parent.children.get(tokens[:length])) is not None:
                self._drop(shorter)
        child = parent.children[tokens] = _Node(parent, tokens, blocks)
        insort(parent.in_order, tokens)
        self._by_use[child] = None
        return child

    def _reclaim(self, reach: Reach) -> bool:
        """Let go of the ending used longest ago; of one that somebody else holds only at last."""
        holders = self._cache.pools[reach].holders
        for _ in range(len(self._by_use)):
            node = next(iter(self._by_use))
            # What a window let go of shows nothing, and stands before what is to be let go.
            if not node.children and holders[node.blocks[reach]] <= 1:
                self._drop(node)
                return True
            self._by_use.move_to_end(node)  # it is in use, or begins what is
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
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
