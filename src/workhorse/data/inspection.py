"""Inspection of a data set: rows decoded document by document, and counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from workhorse.data.batches import Batch
from workhorse.data.dataset import Dataset
from workhorse.data.sampling import IGNORE, PADDING

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer


@dataclass(frozen=True)
class SegmentView:
    """A run of adjacent positions of one document in a row."""

    document: int | None
    """Index of the document within the row; None if attention crosses documents."""
    tokens: int
    text: str
    """The input tokens, decoded with their special tokens."""
    last_target: str
    """The target of the last position, decoded; empty if it has no target."""


@dataclass(frozen=True)
class RowView:
    """One row of a batch."""

    source: str
    segments: tuple[SegmentView, ...]
    padding: int
    """Number of positions without a token."""
    ignored: int
    """Number of positions without a target, including padding."""


def view_rows(
    batch: Batch, tokenizer: "Tokenizer", source_names: tuple[str, ...]
) -> tuple[RowView, ...]:
    """Decode the rows of a batch."""
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
            segments.append(
                SegmentView(
                    document=None if batch.documents is None else documents[start],
                    tokens=stop - start,
                    text=tokenizer.decode(tokens[start:stop]),
                    last_target="" if last == IGNORE else tokenizer.decode([last]),
                )
            )
        read = sum(segment.tokens for segment in segments)
        views.append(
            RowView(
                source="padding" if source == PADDING else source_names[source],
                segments=tuple(segments),
                padding=len(tokens) - read,
                ignored=targets.count(IGNORE),
            )
        )
    return tuple(views)


def describe(dataset: Dataset) -> dict[str, Any]:
    """Return the counts of a data set by split and source; `bytes` is in UTF-8."""
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
    """Return the (start, stop) of each run of equal values."""
    edges = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    bounds = [0, *edges, len(values)] if values else []
    return list(pairwise(bounds))
