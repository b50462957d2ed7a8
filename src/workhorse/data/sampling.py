"""The order and the cutting of training rows: permutations, mixing, packing and windows.

The order of rows must be a pure function of their numbers, for corpora of any size, on every
machine and version. A stored permutation would take eight bytes per row, and NumPy does not promise
the same random streams from version to version.

A document of n tokens makes n - 1 predictions, and a row has room for seq_len. Longer documents are
cut into full rows and a remainder. Remainders and shorter documents, longest first, each go to the
row with the least room that still fits them, else to a new one. Fewer documents are cut than by
concatenation, with little padding (Ding et al., "Fewer Truncations Improve Language Modeling",
2404.10830, section 3).

Every token but the first of each document is predicted exactly once; a piece after a cut starts
with the token that the previous piece predicted last.

- `windows`: the stream is cut into adjacent windows of seq_len predictions, each used once per
  epoch, in an order and from a starting point drawn for every epoch. As in GPT-2, a row may hold
  several documents, and attention crosses between them.
- `random_windows`: windows start anywhere, drawn independently. As in nanoGPT, without epochs.
- `documents`: a row holds whole documents that do not see each other (`packing`).
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workhorse.data.config import Packing
from workhorse.data.dataset import TokenStream
from workhorse.errors import WorkhorseError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SMALL = 256
FEISTEL_ROUNDS = 4


def derive(seed: int, *labels: str | int) -> int:
    """A 64-bit key for one purpose; the labels distinguish it from other purposes."""
    digest = hashlib.sha256("/".join(map(str, (seed, *labels))).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def permute(indices: Indices, size: int, key: int) -> Indices:
    """Where a keyed permutation of `range(size)` sends each index.

    Up to `SMALL` indices are sorted by random numbers, which is exactly uniform, while a network of
    so few bits is not. Beyond that, a Feistel network permutes the next even power of two; an index
    sent past `size` walks along its cycle until it falls inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4.2), in fewer than four steps on average.
    """
    if size <= SMALL:
        return np.argsort(random_numbers(np.arange(size), key), kind="stable")[indices]
    half_bits = ((size - 1).bit_length() + 1) // 2
    round_keys = random_numbers(np.arange(FEISTEL_ROUNDS), key)
    values = indices.astype(np.uint64)
    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking], half_bits, round_keys)
        walking = values >= size
    return values.astype(np.int64)


def random_numbers(indices: Indices, key: int) -> Words:
    """One uniform 64-bit number per index."""
    return _mixed(indices.astype(np.uint64) + np.uint64(key))


def _feistel(values: Words, half_bits: int, round_keys: Words) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in round_keys:
        scrambled = _mixed(right + round_key)
        left, right = right, left ^ (scrambled & mask)
    return (left << bits) | right


def _mixed(values: Words) -> Words:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


MIXING_BLOCK = 10_000
"""Number of rows over which the shares are exact, to one row."""


class Mixture:
    """Assigns rows to sources: a pure function of the row's number. No source skips a row.

    Args:
        names: of the sources, for messages.
        weights: positive, in any unit.
        seed: of the order inside each block.

    Raises:
        WorkhorseError: a share too small for one row in a block.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        shares = np.asarray(weights) / np.sum(weights) * MIXING_BLOCK
        # Largest remainders: round down, then one more to those that lost most.
        self.counts = np.floor(shares).astype(np.int64)
        missing = MIXING_BLOCK - int(self.counts.sum())
        self.counts[np.argsort(self.counts - shares, kind="stable")[:missing]] += 1
        for name, count, weight in zip(names, self.counts, weights, strict=True):
            if count == 0:
                raise WorkhorseError(
                    f"weight {weight:g} gives {name!r} less than one row in {MIXING_BLOCK:,}; "
                    "raise it or drop the source"
                )
        self._ends = np.cumsum(self.counts)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """For each row of the run, the index of its source and its number within that source."""
        if len(self.counts) == 1:
            return np.zeros_like(indices), indices
        blocks = indices // MIXING_BLOCK
        slots = np.empty_like(indices)
        for block in sorted(set(blocks.tolist())):
            chosen = blocks == block
            key = derive(self.seed, "mixing", block)
            slots[chosen] = permute(indices[chosen] % MIXING_BLOCK, MIXING_BLOCK, key)
        sources = np.searchsorted(self._ends, slots, side="right")
        within = slots - (self._ends - self.counts)[sources]
        return sources, blocks * self.counts[sources] + within


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


IGNORE = -100
"""The target of a position that predicts nothing: equal to `workhorse.nn.logprobs.IGNORE`, which
this package must not import."""

PADDING = -1
"""The document number of positions without a token."""


@dataclass(frozen=True)
class Rows:
    """Rows of `(rows, seq)`: inputs, targets, and the document of each."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64] | None = None

    @classmethod
    def of_windows(cls, windows: npt.NDArray[np.int64]) -> "Rows":
        """From windows of `(rows, seq + 1)` tokens."""
        return cls(windows[:, :-1], windows[:, 1:])


class Sampler(Protocol):
    """The endless rows of one stream."""

    rows_per_epoch: int

    def rows(self, indices: Indices) -> Rows:
        """The rows with these numbers, counted from the start of the run."""
        ...


def sampler(packing: Packing, stream: TokenStream, seq_len: int, seed: int) -> Sampler:
    """The sampler for one kind of packing; `seed` is that of the stream."""
    kinds = {"windows": Windows, "random_windows": RandomWindows, "documents": PackedDocuments}
    return kinds[packing](stream, seq_len, seed)


class Windows:
    """Adjacent windows, each once per epoch; an epoch leaves out at most 2·seq_len tokens."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        _check_length(stream, seq_len)
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        # One window fewer than would fit leaves room to start anywhere in the first.
        self.rows_per_epoch = max((len(stream) - seq_len) // seq_len, 1)
        self.phases = min(len(stream) - self.rows_per_epoch * seq_len, seq_len)

    def rows(self, indices: Indices) -> Rows:
        starts = np.empty_like(indices)
        epochs = indices // self.rows_per_epoch
        for epoch in sorted(set(epochs.tolist())):
            chosen = epochs == epoch
            order = derive(self.seed, "order", epoch)
            phase = derive(self.seed, "phase", epoch) % self.phases
            windows = permute(indices[chosen] % self.rows_per_epoch, self.rows_per_epoch, order)
            starts[chosen] = windows * self.seq_len + phase
        return _windows_at(self.stream, starts, self.seq_len)


class RandomWindows:
    """Windows that start anywhere; an epoch only means as many tokens as there are."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        _check_length(stream, seq_len)
        self.stream, self.seq_len = stream, seq_len
        self.key = derive(seed, "start")
        self.rows_per_epoch = max(len(stream) // seq_len, 1)

    def rows(self, indices: Indices) -> Rows:
        starts = random_numbers(indices, self.key) % np.uint64(len(self.stream) - self.seq_len)
        return _windows_at(self.stream, starts.astype(np.int64), self.seq_len)


class PackedDocuments:
    """Rows of whole documents, each row once per epoch, in an order drawn for every epoch."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        self.plan = pack(stream.ends, seq_len)
        self.rows_per_epoch = len(self.plan)
        if not self.rows_per_epoch:
            raise WorkhorseError(
                f"the documents of {stream.name!r} have no token to predict; give longer ones"
            )

    def rows(self, indices: Indices) -> Rows:
        rows = np.empty_like(indices)
        epochs = indices // self.rows_per_epoch
        for epoch in sorted(set(epochs.tolist())):
            chosen = epochs == epoch
            order = derive(self.seed, "order", epoch)
            rows[chosen] = permute(
                indices[chosen] % self.rows_per_epoch, self.rows_per_epoch, order
            )
        return self.planned_rows(rows)

    def planned_rows(self, numbers: Indices) -> Rows:
        """Rows by their number in the plan, not shuffled."""
        shape = (len(numbers), self.seq_len)
        documents = np.full(shape, PADDING)
        rows = Rows(np.zeros(shape, np.int64), np.full(shape, IGNORE), documents)
        for row, number in enumerate(numbers.tolist()):
            column = 0
            for document, (start, length) in enumerate(self.plan.row(number)):
                tokens = self.stream.read(start, start + length + 1)
                place = slice(column, column + length)
                rows.tokens[row, place] = tokens[:-1]
                rows.targets[row, place] = tokens[1:]
                documents[row, place] = document
                column += length
        return rows


def _windows_at(stream: TokenStream, starts: Indices, seq_len: int) -> Rows:
    windows = np.empty((len(starts), seq_len + 1), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        windows[row] = stream.read(start, start + seq_len + 1)
    return Rows.of_windows(windows)


def _check_length(stream: TokenStream, seq_len: int) -> None:
    if len(stream) <= seq_len:
        raise WorkhorseError(
            f"{stream.name!r} has {len(stream)} tokens to train on, fewer than one window of "
            f"seq_len + 1 = {seq_len + 1}; give more text or a smaller seq_len"
        )
