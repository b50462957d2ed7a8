"""Turns token streams into training rows and orders them: windows, mixing, permutations.

A row has seq_len predictions. There are four kinds of packing:

- `windows`: the stream is cut into adjacent windows. Each is used once per epoch. Every epoch draws
  its own order and starting point. As in GPT-2, a row may hold several documents, and attention
  crosses between them.
- `random_windows`: windows start at independent random positions, without epochs, as in nanoGPT.
- `documents`: a row holds whole documents that do not attend to each other (see `packing`).
- `padded`: a row holds one document, or its start or end.

The order is a pure function of the row index, on every machine and with every library version. A
stored permutation would take eight bytes per row, and NumPy does not guarantee the same random
streams in all versions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from workhorse.data.config import Packing, TooLong
from workhorse.data.dataset import TokenStream
from workhorse.data.packing import Indices, one_per_row, pack
from workhorse.errors import WorkhorseError

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


IGNORE = -100
"""Target of positions that do not count in the loss. It must equal `workhorse.nn.logprobs.IGNORE`,
which is not imported because this package does not depend on `workhorse.nn`."""

PADDING = -1
"""Document index of positions without a token, and source index of rows without tokens."""


@dataclass(frozen=True)
class Rows:
    """Inputs, targets and document indices of rows, each `(rows, seq)`; see `Batch`."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None
    values: npt.NDArray[np.float32] | None = None
    """(rows)"""
    reference: npt.NDArray[np.float32] | None = None
    """(rows)"""

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


def sampler(
    packing: Packing, stream: TokenStream, seq_len: int, seed: int, too_long: TooLong | None = None
) -> Sampler:
    """Make the sampler of a token stream for a kind of packing; see `DataConfig.too_long`."""
    match packing:
        case "windows":
            return Windows(stream, seq_len, seed)
        case "random_windows":
            return RandomWindows(stream, seq_len, seed)
        case "documents" | "padded":
            return WholeDocuments(stream, seq_len, seed, packing, too_long)


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


class WholeDocuments:
    """Rows of whole documents, each once per epoch, in a new random order every epoch.

    The rows of a group, such as a pair, stay adjacent.

    Args:
        stream: the documents.
        seq_len: the number of predictions per row.
        seed: the seed of the order.
        packing: `documents` for several documents per row, `padded` for one.
        too_long: see `DataConfig.too_long`.

    Raises:
        WorkhorseError: no document has a token to learn, or all are too long.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        seed: int,
        packing: Literal["documents", "padded"] = "documents",
        too_long: TooLong | None = None,
    ) -> None:
        self.stream, self.seq_len, self.seed, self.packing = stream, seq_len, seed, packing
        if packing == "padded":
            self.plan = one_per_row(stream, seq_len, too_long or "drop")
        else:
            default: TooLong = "drop" if stream.weighted else "split"
            self.plan = pack(stream, seq_len, too_long or default)
        self.rows_per_epoch = len(self.plan)
        if not self.rows_per_epoch:
            plan = self.plan
            if plan.dropped:
                raise WorkhorseError(
                    f"all {plan.dropped:,} documents of {stream.name!r} that could be learned have "
                    f"more than {seq_len:,} predictions; increase train.seq_len, or set "
                    "data.too_long=keep_end"
                )
            raise WorkhorseError(
                f"the documents of {stream.name!r} have no token to predict; add longer documents"
            )

    @property
    def left_out(self) -> str | None:
        """A line that says how many documents are not used; None if all are."""
        reasons = {
            f"longer than {self.seq_len:,} predictions": self.plan.dropped,
            "without a token to learn": self.plan.unlearned,
        }
        counts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        if not counts:
            return None
        return (
            f"{self.stream.name}: {' and '.join(counts)} of {self.stream.n_documents:,} documents "
            "are not used; see train.seq_len and data.too_long"
        )

    def rows(self, indices: Indices) -> Rows:
        rows = np.empty_like(indices)
        epochs = indices // self.rows_per_epoch
        size = self.stream.group
        for epoch in sorted(set(epochs.tolist())):
            chosen = epochs == epoch
            order = derive(self.seed, "order", epoch)
            groups, members = np.divmod(indices[chosen] % self.rows_per_epoch, size)
            rows[chosen] = permute(groups, self.rows_per_epoch // size, order) * size + members
        return self.planned_rows(rows)

    def planned_rows(self, numbers: Indices) -> Rows:
        """Return the rows with these indices in the packing plan, without shuffling."""
        shape, stream = (len(numbers), self.seq_len), self.stream
        documents = np.full(shape, PADDING)
        weights = np.zeros(shape, np.float32)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE)
        for row, number in enumerate(numbers.tolist()):
            column = 0
            for document, (start, length) in enumerate(self.plan.row(number)):
                piece = stream.read(start, start + length + 1)
                weight = stream.read_weights(start + 1, start + length + 1)
                place = slice(column, column + length)
                tokens[row, place] = piece[:-1]
                targets[row, place] = np.where(weight > 0, piece[1:], IGNORE)
                weights[row, place] = weight
                documents[row, place] = document
                column += length
        if self.packing == "documents":
            return Rows(tokens, targets, documents, weights if stream.weighted else None)
        own = self.plan.pieces.documents[numbers]
        return Rows(
            tokens,
            targets,
            weights=weights if stream.weighted else None,
            values=None if stream.values is None else stream.values[own],
            reference=None if stream.reference is None else stream.reference[own].astype("f4"),
        )


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
