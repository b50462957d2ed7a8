"""Builds the batch of any step directly from the step number, and decodes batches for display.

A batch holds rows: sequences of `seq_len` token ids. `batches[step]` depends only on the seed, the
step and the global batch size, and on `offset` if a run changed its batch size. So a run needs only
the step number to resume, and micro-batches and ranks read slices of the same global batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workhorse.data.config import Packing, TooLong
from workhorse.data.dataset import Dataset, Split, TokenStream
from workhorse.data.sampling import (
    IGNORE,
    PADDING,
    Indices,
    Mixture,
    Rows,
    WholeDocuments,
    derive,
    sampler,
)
from workhorse.errors import WorkhorseError

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer


@dataclass(frozen=True)
class Batch:
    """A batch of token sequences (rows). Tensors are int64 unless another dtype is stated."""

    tokens: Tensor
    """Input token ids, `(batch, seq)`; 0 on padding."""
    targets: Tensor
    """Next token of each position, `(batch, seq)`; `IGNORE` (-100) on padding."""
    documents: Tensor | None
    """Index of each position's document within its row, `(batch, seq)`; -1 on padding. Positions
    attend only to their own document. None: attention crosses documents."""
    sources: Tensor
    """Index of each row's source in `Batches.source_names`, `(batch,)`; -1 for a row of padding."""
    weights: Tensor | None = None
    """Loss weight of each target, `(batch, seq)` float32. None: 1 for each."""
    group: Tensor | None = None
    """Index of each row's group, `(batch,)`. A group is a set of adjacent rows, such as all answers
    to one prompt. None: each row is its own group."""
    values: Tensor | None = None
    """A number for each row that the objective uses, `(batch,)` float32: for example 1 for a
    desirable and 0 for an undesirable answer."""
    reference: Tensor | None = None
    """The reference model's log-probability of each row, `(batch,)` float32: the sum over its
    targets, each multiplied by its weight."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> "Batch":
        """Return the rows `start:stop`, such as a micro-batch."""
        return self._each(lambda tensor: tensor[start:stop])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all fields that are not None."""
        return [one for one in vars(self).values() if one is not None]

    def columns(self, own: slice) -> "Batch":
        """Return the positions `own` of every row, such as one rank's shard of the sequences."""
        return self._each(lambda tensor: tensor if tensor.ndim == 1 else tensor[:, own])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Copy the batch to another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> "Batch":
        """Copy the batch to pinned memory, so that copies to CUDA can be asynchronous."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: one for name, one in vars(self).items() if one is not None}
        return replace(self, **{name: change(one) for name, one in tensors.items()})


class Batches:
    """An endless sequence of training batches from a data split, indexed by step.

    Args:
        split: the token streams to read, one per source, and their weights.
        seq_len: number of input tokens, and of predictions, per row.
        batch_size: number of rows in the global batch of a step, over all ranks and micro-batches.
        seed: seed of the row order; the same seed gives the same tokens on every machine.
        packing: how rows are cut from the streams (see `workhorse.data.sampling`).
        too_long: handling of long documents; see `DataConfig.too_long`.
        offset: added to every row index. If the batch size changes during a run,
            `offset = rows read - steps done * batch_size` continues with the next unread row. The
            batches of earlier steps are then wrong.

    Raises:
        WorkhorseError: `seq_len` or `batch_size` is below 1, a source has too few tokens for one
            row, or the weight of a source is too small.

    Attributes:
        ahead: True if a batch may be read before the update of the previous step.
        figures: values to log with every step.
        shown: completions to show with every logged step.
    """

    ahead = True
    figures: Mapping[str, float] = MappingProxyType({})
    shown: Sequence[dict[str, Any]] = ()

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        packing: Packing = "windows",
        too_long: TooLong | None = None,
        offset: int = 0,
    ) -> None:
        _check_sizes(split, seq_len, batch_size)
        self._split = split
        self.seq_len, self.batch_size, self.offset = seq_len, batch_size, offset
        self.packing: Packing = packing
        self.source_names = tuple(stream.name for stream in split.streams)
        self._samplers = [
            sampler(packing, stream, seq_len, derive(seed, stream.name), too_long)
            for stream in split.streams
        ]
        self._mixture = Mixture(self.source_names, split.weights, seed)

    @property
    def rows_per_epoch(self) -> dict[str, int]:
        """Number of rows in an epoch of each source, by source name."""
        pairs = zip(self.source_names, self._samplers, strict=True)
        return {name: sampler.rows_per_epoch for name, sampler in pairs}

    @property
    def left_out(self) -> list[str]:
        """A line for each source with documents that are not used."""
        whole = [one for one in self._samplers if isinstance(one, WholeDocuments)]
        return [line for one in whole if (line := one.left_out)]

    def __getitem__(self, step: int) -> Batch:
        """Return the global batch of a step."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return the rows `start:stop` of the global batch of a step."""
        first = self.offset + step * self.batch_size
        assert first >= 0
        assert 0 <= start <= stop <= self.batch_size
        groups, members = np.divmod(np.arange(first + start, first + stop), self._split.group)
        sources, numbers = self._mixture.locate(groups)
        numbers = numbers * self._split.group + members
        parts = []
        for source in sorted(set(sources.tolist())):
            places = np.flatnonzero(sources == source)
            parts.append((places, self._samplers[source].rows(numbers[places])))
        return _batch(parts, sources, self.seq_len, self._split, self.packing)


class ValidationBatches:
    """The validation batches of a split: each token is predicted once, in batches of equal shape.

    The rows are adjacent windows of each token stream. The last target of a window is the first
    input of the next one, so only the first token of a stream is not predicted. With
    `packing="documents"` the rows are packed documents, and the first token of each document is not
    predicted. The last window of a stream and the last batch are padded, so that a compiled model
    sees only one shape.

    Args:
        split: the token streams to read, one per source; their weights are not used.
        seq_len: number of predictions per row.
        batch_size: number of rows per batch.
        packing: the packing used in training; `random_windows` is validated like `windows`.
        too_long: handling of long documents; see `DataConfig.too_long`.
        max_rows: maximum number of rows, spread evenly over the split; None: all rows.

    Raises:
        WorkhorseError: `seq_len` or `batch_size` is below 1, or the split has no token to predict.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_size: int,
        packing: Packing = "windows",
        too_long: TooLong | None = None,
        max_rows: int | None = None,
    ) -> None:
        _check_sizes(split, seq_len, batch_size)
        self._split = split
        self.seq_len, self.batch_size = seq_len, batch_size
        self.packing: Packing = packing
        self.source_names = tuple(stream.name for stream in split.streams)
        self._samplers = [
            WholeDocuments(stream, seq_len, 0, packing, too_long)
            if packing in ("documents", "padded")
            else _TiledWindows(stream, seq_len)
            for stream in split.streams
        ]
        self._ends = np.cumsum([sampler.rows_per_epoch for sampler in self._samplers])
        total = int(self._ends[-1])
        if total == 0:
            raise WorkhorseError("the validation split has no token to predict; add text to it")
        size = split.group
        groups = total // size
        taken = groups if max_rows is None else min(max(max_rows // size, 1), groups)
        self.whole = taken == groups
        # Indices of `taken` groups of rows, spread evenly over all groups.
        chosen = np.arange(taken) * groups // taken
        self._rows = (chosen[:, None] * size + np.arange(size)).reshape(-1)

    def documents(self, source: int) -> Indices:
        """Return the index in its stream of the document in each row of a source, in order.

        Only for `packing="padded"`, with all rows.
        """
        sampler = self._samplers[source]
        assert isinstance(sampler, WholeDocuments)
        return sampler.plan.pieces.documents

    def __len__(self) -> int:
        """Number of batches."""
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
        return _batch(parts, sources, self.seq_len, self._split, self.packing)


class _TiledWindows:
    """Cuts a whole token stream into adjacent windows, in order. The last window is padded."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
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
    parts: list[tuple[Indices, Rows]],
    sources: Indices,
    seq_len: int,
    split: Split,
    packing: Packing,
) -> Batch:
    """Build a batch. `parts` has, for each source, the positions in the batch and the rows.

    Which fields it has depends only on the split and the packing, so that all batches are alike.
    """
    n_rows, streams = len(sources), split.streams
    shape = (n_rows, seq_len)
    fields: dict[str, np.ndarray] = {
        "tokens": np.zeros(shape, np.int64),
        "targets": np.full(shape, IGNORE),
    }
    if packing == "documents":
        fields["documents"] = np.full(shape, PADDING)
    if split.weighted:
        fields["weights"] = np.ones(shape, np.float32)
    if any(stream.values is not None for stream in streams):
        fields["values"] = np.zeros(n_rows, np.float32)
    if any(stream.reference is not None for stream in streams):
        fields["reference"] = np.zeros(n_rows, np.float32)
    for places, rows in parts:
        for name, into in fields.items():
            given = getattr(rows, name)
            if given is not None:
                into[places] = given
    fields["sources"] = sources
    if split.group > 1:
        fields["group"] = np.arange(n_rows) // split.group
    return Batch(**{"documents": None, **{k: torch.from_numpy(one) for k, one in fields.items()}})


def _check_sizes(split: Split, seq_len: int, batch_size: int) -> None:
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise WorkhorseError(f"{name}={value} is less than 1; choose 1 or more")
    if batch_size % split.group:
        raise WorkhorseError(
            f"batch_size={batch_size} splits groups of {split.group} rows; choose a multiple of "
            f"{split.group}"
        )


@dataclass(frozen=True)
class SegmentView:
    """Adjacent positions in a row that belong to one document, decoded for display."""

    document: int | None
    """Index of the document within the row; None if attention crosses documents."""
    tokens: int
    text: str
    """The input tokens as a string, special tokens included."""
    last_target: str
    """The target of the last position, decoded; empty if it has no target."""
    pieces: tuple[tuple[str, float], ...] | None = None
    """Each token as text, also the last target, with the weight of its loss; None if tokens have no
    weights. The text of an incomplete character is in its last token."""


@dataclass(frozen=True)
class RowView:
    """One row of a batch, decoded for display."""

    source: str
    segments: tuple[SegmentView, ...]
    padding: int
    """Number of positions without a token."""
    ignored: int
    """Number of positions that do not count in the loss, including padding."""
    answer: str = ""
    """`chosen` or `rejected` in a pair, `desirable` or `undesirable` with a label, or empty."""


def view_rows(
    batch: Batch, tokenizer: "Tokenizer", source_names: tuple[str, ...]
) -> tuple[RowView, ...]:
    """Decode the rows of a batch for display; `source_names` is `Batches.source_names`."""
    views = []
    for row, source in enumerate(batch.sources.tolist()):
        tokens, targets = batch.tokens[row].tolist(), batch.targets[row].tolist()
        used = max((at + 1 for at, target in enumerate(targets) if target != IGNORE), default=0)
        documents = [0] * used if batch.documents is None else batch.documents[row].tolist()
        segments = []
        for start, stop in _runs(documents):
            if documents[start] == PADDING:
                continue
            last = targets[stop - 1]
            pieces = None
            if batch.weights is not None:
                pushed = tokenizer.stream().push
                shown = tokens[start:stop] if last == IGNORE else [*tokens[start:stop], last]
                # A token's weight is that of the position before it, which predicts it.
                learned = [0.0, *_weights(batch, row)[start:stop]]
                pieces = tuple(zip(map(pushed, shown), learned, strict=False))
            segments.append(
                SegmentView(
                    document=None if batch.documents is None else documents[start],
                    tokens=stop - start,
                    text=tokenizer.decode(tokens[start:stop]),
                    last_target="" if last == IGNORE else tokenizer.decode([last]),
                    pieces=pieces,
                )
            )
        read = sum(segment.tokens for segment in segments)
        views.append(
            RowView(
                source="padding" if source == PADDING else source_names[source],
                segments=tuple(segments),
                padding=len(tokens) - read,
                ignored=targets.count(IGNORE),
                answer="" if source == PADDING else _answer(batch, row),
            )
        )
    return tuple(views)


def _answer(batch: Batch, row: int) -> str:
    if batch.group is not None:
        return ("chosen", "rejected")[row % 2]
    return "" if batch.values is None else ("undesirable", "desirable")[batch.values[row] > 0]


def _weights(batch: Batch, row: int) -> list[float]:
    """Return the weight of each target of a row; 0 if it is ignored."""
    assert batch.weights is not None
    return batch.weights[row].where(batch.targets[row] != IGNORE, 0).tolist()


def describe(dataset: Dataset) -> dict[str, Any]:
    """Return the metadata of a data set, with the size of each source in each split."""
    splits = {}
    for split in (dataset.train, dataset.validation):
        if split is None:
            continue
        splits[split.name] = {
            stream.name: {
                "documents": stream.n_documents,
                "bytes": stream.n_bytes,
                "tokens": len(stream),
                "bytes_per_token": stream.n_bytes / len(stream),
                "unknown": stream.n_unknown,
                "weight": weight,
            }
            for stream, weight in zip(split.streams, split.weights, strict=True)
        }
    return {
        "folder": dataset.folder,
        "fingerprint": dataset.fingerprint,
        "tokenizer": dataset.manifest.tokenizer,
        "vocab_size": dataset.manifest.vocab_size,
        "dtype": dataset.manifest.dtype,
        "splits": splits,
    }


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, stop) of each run of equal adjacent values."""
    edges = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    bounds = [0, *edges, len(values)] if values else []
    return list(pairwise(bounds))
