"""How rows are cut from a stream of tokens. Each way is a pure function of the row's number.

- `windows`: the stream is cut into adjacent windows of seq_len predictions, each used once per
  epoch, in an order and from a starting point drawn for every epoch. As in GPT-2, a row may hold
  several documents, and attention crosses between them.
- `random_windows`: windows start anywhere, drawn independently. As in nanoGPT, without epochs.
- `documents`: a row holds whole documents that do not see each other (`packing`).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workhorse.data.config import Packing
from workhorse.data.rows.packing import pack
from workhorse.data.rows.permutation import Indices, derive, permute, random_numbers
from workhorse.data.shards.stream import TokenStream
from workhorse.errors import WorkhorseError

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
