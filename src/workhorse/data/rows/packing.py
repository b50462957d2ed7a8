"""Documents packed whole into rows: best-fit decreasing.

A document of n tokens makes n - 1 predictions, and a row has room for seq_len. Longer documents are
cut into full rows and a remainder. Remainders and shorter documents, longest first, each go to the
row with the least room that still fits them, else to a new one. Fewer documents are cut than by
concatenation, with little padding (Ding et al., "Fewer Truncations Improve Language Modeling",
2404.10830, section 3).

Every token but the first of each document is predicted exactly once; a piece after a cut starts
with the token that the previous piece predicted last.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from workhorse.data.rows.permutation import Indices


@dataclass(frozen=True)
class PackingPlan:
    """The pieces of documents in each row, as arrays, so that millions take megabytes."""

    starts: Indices
    """For each piece, the position of its first token in the stream."""
    lengths: Indices
    """For each piece, its number of predictions; it spans one token more."""
    bounds: Indices
    """Row i holds the pieces `bounds[i]` to `bounds[i + 1]`."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> list[tuple[int, int]]:
        """The (start, predictions) of each piece of a row."""
        pieces = slice(self.bounds[index], self.bounds[index + 1])
        return list(zip(self.starts[pieces].tolist(), self.lengths[pieces].tolist(), strict=True))


def pack(ends: Indices, seq_len: int) -> PackingPlan:
    """Plan the rows for documents that end at these positions; depends only on its arguments."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    predictions = np.maximum(ends - begins - 1, 0)
    full, rest = predictions // seq_len, predictions % seq_len
    # Full rows: one for each multiple of seq_len in each document.
    owner = np.repeat(np.arange(len(ends)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    full_starts = begins[owner] + nth * seq_len
    # Remainders, longest first; equal ones in the order of the corpus.
    order = np.argsort(-rest, kind="stable")
    order = order[rest[order] > 0]
    rest_starts, rest_lengths = (begins + full * seq_len)[order], rest[order]
    rows = np.concatenate(
        [np.arange(len(owner)), len(owner) + _best_fit(rest_lengths.tolist(), seq_len)]
    )
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate([full_starts, rest_starts])[by_row]
    lengths = np.concatenate([np.full(len(owner), seq_len), rest_lengths])[by_row]
    n_rows = int(rows.max()) + 1 if len(rows) else 0
    return PackingPlan(starts, lengths, np.searchsorted(rows[by_row], np.arange(n_rows + 1)))


def _best_fit(lengths: list[int], room: int) -> Indices:
    """The row of each length, given from the longest to the shortest."""
    rows_with: dict[int, list[int]] = defaultdict(list)  # room left -> rows
    rooms = 0  # bit r is set while some row has exactly r left
    placed = np.empty(len(lengths), dtype=np.int64)
    n_rows = 0
    for index, length in enumerate(lengths):
        enough = rooms >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1  # the lowest set bit
            row = rows_with[left].pop()
            if not rows_with[left]:
                rooms &= ~(1 << left)
        else:
            left, row, n_rows = room, n_rows, n_rows + 1
        placed[index] = row
        left -= length
        rows_with[left].append(row)
        rooms |= 1 << left
    return placed
