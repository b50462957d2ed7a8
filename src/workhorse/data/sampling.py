"""Cuts token streams into training rows and orders them: windows, packing, mixing, permutations.

A row has seq_len predictions. There are three kinds of packing:

- `windows`: the stream is cut into adjacent windows. Each is used once per epoch. Every epoch draws
  its own order and starting point. As in GPT-2, a row may hold several documents, and attention
  crosses between them.
- `random_windows`: windows start at independent random positions, without epochs, as in nanoGPT.
- `documents`: a row holds whole documents that do not attend to each other.

For `documents`, rows are packed by best fit (Ding et al., "Fewer Truncations Improve Language
Modeling", 2404.10830, section 3). A document of n tokens has n - 1 predictions. Documents with more
than seq_len predictions are cut into full rows and a remainder. Remainders and shorter documents
are placed longest first, each in the row with the least room that still fits it, else in a new row.
This cuts fewer documents than concatenation, with little padding. Every token except the first of
each document is predicted exactly once: a piece after a cut starts with the last target of the
previous piece.

The order is a pure function of the row index, on every machine and with every library version. A
stored permutation would take eight bytes per row, and NumPy does not guarantee the same random
streams in all versions.
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
    """Derive a 64-bit key from a seed; different labels give independent keys."""
    digest = hashlib.sha256("/".join(map(str, (seed, *labels))).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def permute(indices: Indices, size: int, key: int) -> Indices:
    """Apply a keyed permutation of `range(size)` to the indices.

    Up to `SMALL` indices are sorted by random numbers, which is exactly uniform; a Feistel network
    with so few bits is not. For larger sizes, a Feistel network permutes a range whose size is the
    next even power of two. It is applied again to results of `size` or more until they are less
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4.2).
    This takes fewer than four steps on average.
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
    """Return one uniform 64-bit random number per index."""
    return _mixed(indices.astype(np.uint64) + np.uint64(key))


def _feistel(values: Words, half_bits: int, round_keys: Words) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in round_keys:
        scrambled = _mixed(right + round_key)
        left, right = right, left ^ (scrambled & mask)
    return (left << bits) | right


def _mixed(values: Words) -> Words:
    """Apply the SplitMix64 hash function: every input bit affects every output bit."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


MIXING_BLOCK = 10_000
"""Number of rows in a block. In each block, every source has its share of the rows by weight,
rounded to a whole number."""


class Mixture:
    """Maps each row index of a run to a source and a row index in that source.

    Each block of `MIXING_BLOCK` rows has rows of every source in proportion to its weight, in
    random order. Blocks use the rows of a source consecutively, so no row is skipped or repeated.

    Args:
        names: names of the sources, for messages.
        weights: relative weights of the sources, positive.
        seed: seed of the order inside each block.

    Raises:
        WorkhorseError: a weight gives a source less than one row per block.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        shares = np.asarray(weights) / np.sum(weights) * MIXING_BLOCK
        # Largest remainder method: round down, then add one to the sources that lost most.
        self.counts = np.floor(shares).astype(np.int64)
        missing = MIXING_BLOCK - int(self.counts.sum())
        self.counts[np.argsort(self.counts - shares, kind="stable")[:missing]] += 1
        for name, count, weight in zip(names, self.counts, weights, strict=True):
            if count == 0:
                raise WorkhorseError(
                    f"weight {weight:g} gives {name!r} less than one row in {MIXING_BLOCK:,}; "
                    "raise the weight or remove the source"
                )
        self._ends = np.cumsum(self.counts)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the source index of each row of the run, and the row index within that source."""
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
    """The document pieces in each row, stored as arrays to save memory."""

    starts: Indices
    """Position of each piece's first token in the stream."""
    lengths: Indices
    """Number of predictions in each piece: its number of tokens minus 1."""
    bounds: Indices
    """Bounds of the rows: row i holds the pieces `bounds[i]:bounds[i + 1]`."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> list[tuple[int, int]]:
        """Return (start position, number of predictions) of each piece of a row."""
        pieces = slice(self.bounds[index], self.bounds[index + 1])
        return list(zip(self.starts[pieces].tolist(), self.lengths[pieces].tolist(), strict=True))


def pack(ends: Indices, seq_len: int) -> PackingPlan:
    """Pack the documents of a stream into rows; `ends` is as in `TokenStream`."""
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    predictions = np.maximum(ends - begins - 1, 0)
    full, rest = predictions // seq_len, predictions % seq_len
    # Full rows: one for each multiple of seq_len in each document.
    owner = np.repeat(np.arange(len(ends)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    full_starts = begins[owner] + nth * seq_len
    # Remainders, longest first; equal lengths stay in corpus order.
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
    """Return a row index for each length, by best fit into rows of length `room`.

    The lengths must be sorted, longest first.
    """
    rows_with: dict[int, list[int]] = defaultdict(list)  # room left -> rows
    cache_stores = 0  # bit r is set while some row has exactly r left
    placed = np.empty(len(lengths), dtype=np.int64)
    n_rows = 0
    for index, length in enumerate(lengths):
        enough = cache_stores >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1  # the lowest set bit
            row = rows_with[left].pop()
            if not rows_with[left]:
                cache_stores &= ~(1 << left)
        else:
            left, row, n_rows = room, n_rows, n_rows + 1
        placed[index] = row
        left -= length
        rows_with[left].append(row)
        cache_stores |= 1 << left
    return placed


IGNORE = -100
"""Target of positions that do not count in the loss. It must equal `workhorse.nn.logprobs.IGNORE`,
which is not imported because this package does not depend on `workhorse.nn`."""

PADDING = -1
"""Document index of positions without a token, and source index of rows without tokens."""


@dataclass(frozen=True)
class Rows:
    """Inputs, targets and document indices of rows, each `(rows, seq)`."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64] | None = None

    @classmethod
    def of_windows(cls, windows: npt.NDArray[np.int64]) -> "Rows":
        """Make rows from windows of tokens, `(rows, seq + 1)`."""
        return cls(windows[:, :-1], windows[:, 1:])


class Sampler(Protocol):
    """Returns training rows of one token stream by index. Indices have no upper limit."""

    rows_per_epoch: int

    def rows(self, indices: Indices) -> Rows:
        """Return the rows with these indices, counted from the start of the run."""
        ...


def sampler(packing: Packing, stream: TokenStream, seq_len: int, seed: int) -> Sampler:
    """Make the sampler of a token stream for a kind of packing."""
    kinds = {"windows": Windows, "random_windows": RandomWindows, "documents": PackedDocuments}
    return kinds[packing](stream, seq_len, seed)


class Windows:
    """Rows that are adjacent windows of the stream, in random order, each once per epoch.

    An epoch starts at a random offset, so it omits up to 2·seq_len tokens at the stream's ends.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        _check_length(stream, seq_len)
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        # One window fewer than fits, so that an epoch can start anywhere in the first window.
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
    """Rows that are windows at random positions.

    There are no epochs: `rows_per_epoch` is the length of the stream divided by seq_len.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        _check_length(stream, seq_len)
        self.stream, self.seq_len = stream, seq_len
        self.key = derive(seed, "start")
        self.rows_per_epoch = max(len(stream) // seq_len, 1)

    def rows(self, indices: Indices) -> Rows:
        starts = random_numbers(indices, self.key) % np.uint64(len(self.stream) - self.seq_len)
        return _windows_at(self.stream, starts.astype(np.int64), self.seq_len)


class PackedDocuments:
    """Rows of packed documents, each once per epoch, in a new random order every epoch."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        self.plan = pack(stream.ends, seq_len)
        self.rows_per_epoch = len(self.plan)
        if not self.rows_per_epoch:
            raise WorkhorseError(
                f"the documents of {stream.name!r} have no token to predict; add longer documents"
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
        """Return the rows with these indices in the packing plan, which is not shuffled."""
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
            f"{stream.name!r} has {len(stream)} training tokens, fewer than one window of "
            f"seq_len + 1 = {seq_len + 1}; add text or reduce seq_len"
        )
