"""Distributes documents over rows: whole documents packed by best fit, or one document per row.

Rows are packed by best fit (Ding et al., "Fewer Truncations Improve Language Modeling", 2404.10830,
section 3). A document of n tokens has n - 1 predictions. Documents with more than seq_len
predictions are cut into full rows and a remainder. Remainders and shorter documents are placed
longest first, each in the row with the least room that still fits it, else in a new row. This cuts
fewer documents than concatenation, with little padding. Every token except the first of each
document is predicted exactly once: a piece after a cut starts with the last target of the previous
piece.

Long documents can also be dropped or shortened. Pieces without a token to learn are omitted.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workhorse.data.config import TooLong
from workhorse.data.dataset import TokenStream

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, stored as arrays so that millions take only megabytes."""

    starts: Indices
    """Position of each piece's first token in the stream."""
    lengths: Indices
    """Number of predictions of each piece. A piece has one token more."""
    documents: Indices
    """Index of each piece's document in the stream."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, chosen: npt.NDArray[np.bool_] | Indices | slice) -> "Pieces":
        return Pieces(self.starts[chosen], self.lengths[chosen], self.documents[chosen])

    def __add__(self, other: "Pieces") -> "Pieces":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Pieces(*map(np.concatenate, pairs))


@dataclass(frozen=True)
class PackingPlan:
    """The document pieces of each row."""

    pieces: Pieces
    bounds: Indices
    """Bounds of the rows: row i holds the pieces `bounds[i]:bounds[i + 1]`."""
    dropped: int = 0
    """Number of documents that were omitted because they are too long."""
    unlearned: int = 0
    """Number of pieces that were omitted because they have no token to learn."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> list[tuple[int, int]]:
        """Return (start position, number of predictions) of each piece of a row."""
        pieces = self.pieces[self.bounds[index] : self.bounds[index + 1]]
        return list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))


def pack(stream: TokenStream, seq_len: int, too_long: TooLong = "split") -> PackingPlan:
    """Pack the documents of a stream into rows of up to `seq_len` predictions, by best fit."""
    documents, dropped = _shortened(stream, seq_len, too_long)
    full, rest = documents.lengths // seq_len, documents.lengths % seq_len
    # Full rows: one for each multiple of seq_len in each document.
    owner = np.repeat(np.arange(len(full)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    whole = Pieces(
        documents.starts[owner] + nth * seq_len,
        np.full(len(owner), seq_len),
        documents.documents[owner],
    )
    remainders = Pieces(documents.starts + full * seq_len, rest, documents.documents)
    remainders = remainders[rest > 0]
    kept, left = whole[_learned(stream, whole)], remainders[_learned(stream, remainders)]
    unlearned = len(whole) + len(remainders) - len(kept) - len(left)
    # Remainders, longest first; equal lengths stay in corpus order.
    left = left[np.argsort(-left.lengths, kind="stable")]
    fitted = len(kept) + _best_fit(left.lengths.tolist(), seq_len)
    rows = np.concatenate([np.arange(len(kept)), fitted])
    by_row = np.argsort(rows, kind="stable")
    n_rows = int(rows.max()) + 1 if len(rows) else 0
    return PackingPlan(
        (kept + left)[by_row],
        np.searchsorted(rows[by_row], np.arange(n_rows + 1)),
        dropped,
        unlearned,
    )


def one_per_row(stream: TokenStream, seq_len: int, too_long: TooLong = "drop") -> PackingPlan:
    """Put each document into a separate row, in the order of the stream.

    The documents of a group (`stream.group` adjacent ones, such as a pair) are kept together.
    """
    assert too_long != "split"
    documents, dropped = _shortened(stream, seq_len, too_long)
    useful = (documents.lengths > 0) & _learned(stream, documents)
    useful = np.repeat(useful.reshape(-1, stream.group).all(axis=1), stream.group)
    kept = documents[useful]
    return PackingPlan(kept, np.arange(len(kept) + 1), dropped, len(useful) - len(kept))


def _shortened(stream: TokenStream, seq_len: int, too_long: TooLong) -> tuple[Pieces, int]:
    """Return each document as one piece, shortened or dropped if it is too long.

    Also returns the number of dropped documents. With `split`, pieces may still be too long.
    """
    ends = stream.ends
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    lengths = np.maximum(ends - starts - 1, 0)
    documents = Pieces(starts, lengths, np.arange(len(ends)))
    match too_long:
        case "split":
            return documents, 0
        case "drop":
            fits = (lengths <= seq_len).reshape(-1, stream.group).all(axis=1)
            fits = np.repeat(fits, stream.group)
            return documents[fits], int(len(fits) - fits.sum())
        case "keep_start":
            return Pieces(starts, np.minimum(lengths, seq_len), documents.documents), 0
        case "keep_end":
            kept = np.minimum(lengths, seq_len)
            return Pieces(starts + lengths - kept, kept, documents.documents), 0


def _learned(stream: TokenStream, pieces: Pieces) -> npt.NDArray[np.bool_]:
    """Return for each piece whether a token of it is learned."""
    if not stream.weighted:
        return np.ones(len(pieces), dtype=bool)
    pairs = zip((pieces.starts + 1).tolist(), pieces.lengths.tolist(), strict=True)
    return np.array(
        [bool(stream.read_weights(first, first + length).any()) for first, length in pairs], bool
    )


def _best_fit(lengths: list[int], room: int) -> Indices:
    """Return a row index for each length, by best fit into rows of length `room`.

    The lengths must be sorted, longest first.
    """
    rows_with: dict[int, list[int]] = defaultdict(list)  # room left -> rows
    free = 0  # bit r is set while some row has exactly r left
    placed = np.empty(len(lengths), dtype=np.int64)
    n_rows = 0
    for index, length in enumerate(lengths):
        enough = free >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1  # the lowest set bit
            row = rows_with[left].pop()
            if not rows_with[left]:
                free &= ~(1 << left)
        else:
            left, row, n_rows = room, n_rows, n_rows + 1
        placed[index] = row
        left -= length
        rows_with[left].append(row)
        free |= 1 << left
    return placed
