"""Batches of rows by the number of the step: random access, no state, no position to save.

`batches[step]` depends only on the seed, the step and the global batch size (and on the offset of a
run that changed it). So the step is the exact position for a resume, and micro-batches and
processes take slices of the same global batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from workhorse.data.config import Packing
from workhorse.data.dataset import Split, TokenStream
from workhorse.data.sampling import (
    IGNORE,
    PADDING,
    Indices,
    Mixture,
    PackedDocuments,
    Rows,
    derive,
    sampler,
)
from workhorse.errors import WorkhorseError


@dataclass(frozen=True)
class Batch:
    """Rows for training or validation; tensors are int64 unless another type is named."""

    tokens: Tensor
    """`(batch, seq)`; 0 on padding."""
    targets: Tensor
    """`(batch, seq)`: the token after each; `IGNORE` (-100) on padding."""
    documents: Tensor | None
    """`(batch, seq)`: numbers of documents within each row, -1 on padding; None: rows are whole."""
    sources: Tensor
    """`(batch,)`: the index of each row's source in `source_names`, -1 for a row of padding."""
    weights: Tensor | None = None
    """`(batch, seq)` float32: how much each target counts; None: 1 for each."""
    group: Tensor | None = None
    """`(batch,)`: the number of the group that each row belongs to, such as a pair of answers or
    all answers to a prompt; None: each row is by itself. Rows of a group are neighbours."""

    def __len__(self) -> int:
        """How many rows."""
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> "Batch":
        """The rows `start` to `stop`: a micro-batch."""
        return self._each(lambda tensor: tensor[start:stop])

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [one for one in vars(self).values() if one is not None]

    def columns(self, own: slice) -> "Batch":
        """Those tokens of every row."""
        return self._each(lambda tensor: tensor if tensor.ndim == 1 else tensor[:, own])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> "Batch":
        """The same batch in pinned memory, from which copies to CUDA are asynchronous."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: one for name, one in vars(self).items() if one is not None}
        return replace(self, **{name: change(one) for name, one in tensors.items()})


class Batches:
    """The endless training batches of a split.

    Args:
        split: its streams and weights.
        seq_len: tokens read, and predictions made, in a row.
        batch_size: rows of the global batch of one step, over all processes and micro-batches.
        seed: determines the order; the same seed gives the same tokens everywhere.
        packing: how rows are cut (see `workhorse.data.sampling`).
        offset: added to the number of every row, counted from the start of the run. A run whose
            batch size changes midway continues with the next row by
            `offset = rows read - steps done * batch_size`; earlier steps then have no batch.

    Raises:
        WorkhorseError: a size below 1, a source shorter than one window, a weight too small.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        packing: Packing = "windows",
        offset: int = 0,
    ) -> None:
        _check_sizes(seq_len, batch_size)
        self.seq_len, self.batch_size, self.offset = seq_len, batch_size, offset
        self.packing: Packing = packing
        self.source_names = tuple(stream.name for stream in split.streams)
        self._samplers = [
            sampler(packing, stream, seq_len, derive(seed, stream.name)) for stream in split.streams
        ]
        self._mixture = Mixture(self.source_names, split.weights, seed)

    @property
    def rows_per_epoch(self) -> dict[str, int]:
        """The number of rows after which each source starts over."""
        pairs = zip(self.source_names, self._samplers, strict=True)
        return {name: sampler.rows_per_epoch for name, sampler in pairs}

    def __getitem__(self, step: int) -> Batch:
        """The global batch of a step."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """The rows `start` to `stop` of the global batch of a step."""
        first = self.offset + step * self.batch_size
        assert first >= 0
        assert 0 <= start <= stop <= self.batch_size
        sources, numbers = self._mixture.locate(np.arange(first + start, first + stop))
        parts = []
        for source in sorted(set(sources.tolist())):
            places = np.flatnonzero(sources == source)
            parts.append((places, self._samplers[source].rows(numbers[places])))
        return _batch(parts, sources, self.seq_len, self.packing)


class ValidationBatches:
    """Every token of a split predicted once, in batches of one shape.

    Windows are adjacent and share one token, so that all tokens but the first of each stream are
    predicted once; the last window is padded. With `packing="documents"` the rows are those of the
    packing, in order, and predict all tokens but the first of each document. The last batch is
    filled up with rows of padding, so that a compiled model sees one shape.

    Args:
        split: its streams; the weights are not used.
        seq_len: predictions in a row.
        batch_size: rows in a batch.
        packing: as in training; `random_windows` validates as `windows` does.
        max_rows: take only this many, spread evenly over the split; None: all.

    Raises:
        WorkhorseError: a size below 1, or nothing to predict.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_size: int,
        packing: Packing = "windows",
        max_rows: int | None = None,
    ) -> None:
        _check_sizes(seq_len, batch_size)
        self.seq_len, self.batch_size = seq_len, batch_size
        self.packing: Packing = packing
        self.source_names = tuple(stream.name for stream in split.streams)
        kind = PackedDocuments if packing == "documents" else _TiledWindows
        self._samplers = [kind(stream, seq_len, 0) for stream in split.streams]
        self._ends = np.cumsum([sampler.rows_per_epoch for sampler in self._samplers])
        total = int(self._ends[-1])
        if total == 0:
            raise WorkhorseError("the validation split has no token to predict; give it more text")
        taken = total if max_rows is None else min(max_rows, total)
        self._rows = np.arange(taken) * total // taken

    def __len__(self) -> int:
        """The number of batches."""
        return math.ceil(len(self._rows) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = self._rows[index * self.batch_size : (index + 1) * self.batch_size]
        sources = np.full(self.batch_size, PADDING)
        sources[: len(rows)] = np.searchsorted(self._ends, rows, side="right")
        parts = []
        for source in sorted(set(sources[: len(rows)].tolist())):
            places = np.flatnonzero(sources == source)
            sampler = self._samplers[source]
            numbers = rows[places] - (self._ends[source] - sampler.rows_per_epoch)
            parts.append((places, sampler.planned_rows(numbers)))
        return _batch(parts, sources, self.seq_len, self.packing)


class _TiledWindows:
    """Adjacent windows from the first token to the last, the last one padded."""

    def __init__(self, stream: TokenStream, seq_len: int, _seed: int) -> None:
        self.stream, self.seq_len = stream, seq_len
        self.rows_per_epoch = math.ceil((len(stream) - 1) / seq_len)

    def planned_rows(self, numbers: Indices) -> Rows:
        shape = (len(numbers), self.seq_len)
        rows = Rows(np.zeros(shape, np.int64), np.full(shape, IGNORE))
        for row, number in enumerate(numbers.tolist()):
            start = number * self.seq_len
            tokens = self.stream.read(start, min(start + self.seq_len + 1, len(self.stream)))
            rows.tokens[row, : len(tokens) - 1] = tokens[:-1]
            rows.targets[row, : len(tokens) - 1] = tokens[1:]
        return rows


def _batch(
    parts: list[tuple[Indices, Rows]], sources: Indices, seq_len: int, packing: Packing
) -> Batch:
    """Interleave the rows of several sources in the order of the batch."""
    shape = (len(sources), seq_len)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE)
    documents = np.full(shape, PADDING) if packing == "documents" else None
    for places, rows in parts:
        tokens[places], targets[places] = rows.tokens, rows.targets
        if documents is not None:
            documents[places] = rows.documents
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        None if documents is None else torch.from_numpy(documents),
        torch.from_numpy(sources),
    )


def _check_sizes(seq_len: int, batch_size: int) -> None:
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise WorkhorseError(f"{name}={value} is not a size; choose 1 or more")
