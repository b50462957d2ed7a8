"""What texts in a cache begin with, so that others which begin alike need not be read again.

A tree: each node is a block of tokens after those of its parent, and holds the blocks of the cache
where their keys and values lie. What nobody used for the longest time is let go when a text needs
its room.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workhorse.nn.cache.blocks import BLOCK, EMPTY, CachedText, Reach
from workhorse.nn.cache.paged import PagedCache


@dataclass(eq=False)
class _Node:
    parent: "_Node | None" = None
    tokens: tuple[int, ...] = ()
    blocks: dict[Reach, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    used: int = 0
    """When it was used last, by the tree's own count."""


class PrefixTree:
    """The beginnings that a cache remembers.

    Args:
        cache: whose blocks they are; it may take them back.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._root = _Node()
        self._uses = 0
        cache.reclaim = self._reclaim

    def adopt(self, text: CachedText, tokens: Sequence[int]) -> int:
        """Let an empty text hold what is known of its beginning; how many tokens that is."""
        path, length = self._path(tokens)
        while length and not self._covers(path, length):  # a window let go of what would be seen
            path, length = path[:-1], (len(path) - 1) * BLOCK
        if length:
            reaches = self._cache.pools
            tables = {reach: [node.blocks[reach] for node in path] for reach in reaches}
            self._cache.adopt(text, length, tables)
            self._use(path)
        return length

    def remember(self, tokens: Sequence[int], text: CachedText) -> None:
        """Keep what a text holds.

        Args:
            tokens: all that it has consumed.
            text: where they lie.
        """
        node, path = self._root, list[_Node]()
        for number, start in enumerate(range(0, len(tokens), BLOCK)):
            some = tuple(tokens[start : start + BLOCK])
            child = node.children.get(some)
            if child is None:
                child = node.children[some] = _Node(node, some, dict.fromkeys(text.tables, EMPTY))
                self._drop_beginnings(node, some)
            for reach, table in text.tables.items():
                if child.blocks[reach] == EMPTY:
                    child.blocks[reach] = self._cache.pools[reach].share(table[number])
            node = child
            path.append(node)
        self._use(path)

    def _path(self, tokens: Sequence[int]) -> tuple[list[_Node], int]:
        """The nodes that begin as the tokens do, and how many tokens agree."""
        node, path, length = self._root, list[_Node](), 0
        while length < len(tokens):
            rest = tuple(tokens[length : length + BLOCK])
            child = node.children.get(rest)
            agreed = len(rest)
            if child is None:
                agreed, child = max(
                    ((_agreed(other.tokens, rest), other) for other in node.children.values()),
                    key=lambda pair: pair[0],
                    default=(0, node),
                )
            if not agreed:
                break
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
        self._uses += 1
        for node in path:
            node.used = self._uses

    def _drop_beginnings(self, parent: _Node, tokens: tuple[int, ...]) -> None:
        """Forget children that another one begins with."""
        for child in list(parent.children.values()):
            shorter = len(child.tokens) < len(tokens)
            if shorter and tokens[: len(child.tokens)] == child.tokens:
                self._drop(child)

    def _reclaim(self, reach: Reach) -> bool:
        """Let go of the ending used longest ago that nobody but this tree holds."""
        holders = self._cache.pools[reach].holders
        free = [node for node in self._endings() if holders[node.blocks[reach]] == 1]
        if not free:
            return False
        self._drop(min(free, key=lambda node: node.used))
        return True

    def _drop(self, node: _Node) -> None:
        for reach, block in node.blocks.items():
            self._cache.pools[reach].release(block)
        assert node.parent is not None
        del node.parent.children[node.tokens]

    def _endings(self) -> Iterator[_Node]:
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            if not node.children:
                yield node
            nodes.extend(node.children.values())


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
