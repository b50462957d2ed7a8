"""The tokens of one source's split: a long sequence over memory-mapped arrays."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from workhorse.errors import WorkhorseError


class TokenStream:
    """Concatenated tokens, and where the documents in them end.

    Args:
        name: of the source.
        shards: the tokens, unsigned integers, in order; usually memory-mapped.
        ends: for each document the position after its last token, ascending; the last is the
            length.
        n_bytes: UTF-8 bytes of the text that the tokens stand for.
        n_unknown: tokens that stand for characters outside the vocabulary.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[np.ndarray],
        ends: npt.NDArray[np.int64],
        n_bytes: int = 0,
        n_unknown: int = 0,
    ) -> None:
        self.name = name
        self.ends = ends
        self.n_bytes = n_bytes
        self.n_unknown = n_unknown
        self._shards = shards
        self._starts = [0, *accumulate(len(shard) for shard in shards)]
        assert (ends[-1] if len(ends) else 0) == len(self), "a document has no end"

    def __len__(self) -> int:
        """Tokens."""
        return self._starts[-1]

    @property
    def n_documents(self) -> int:
        return len(self.ends)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens `start` to `stop`, which must lie inside the stream.

        Raises:
            WorkhorseError: a mapped file has been truncated.
        """
        assert 0 <= start <= stop <= len(self), f"tokens {start} to {stop} of {len(self)}"
        tokens = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            first = self._starts[index]
            last = min(stop, self._starts[index + 1])
            shard = self._shards[index]
            _check_whole(shard)
            tokens[position - start : last - start] = shard[position - first : last - first]
            position = last
        return tokens


def _check_whole(shard: np.ndarray) -> None:
    """Refuse a map that extends past the end of its file: reading there would kill the process."""
    if not isinstance(shard, np.memmap):
        return
    mapped: Any = shard.base
    if isinstance(mapped, mmap) and mapped.size() < len(mapped):
        raise WorkhorseError(
            f"{shard.filename} was cut short while it was read: it has {mapped.size()} bytes of "
            f"{len(mapped)}; put it back, or run workhorse data prepare again"
        )
