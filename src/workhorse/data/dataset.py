"""Prepared data sets: memory-mapped token streams by split and source."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workhorse.data.manifest import ManifestConfig, ShardConfig, StreamConfig, read_manifest
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import open_plain

PREPARE_AGAIN = "run workhorse data prepare again"


class TokenStream:
    """The concatenated tokens of one split of one source, and the ends of its documents.

    Args:
        name: name of the source.
        shards: the tokens in order, as unsigned integers; usually memory-mapped.
        ends: position after the last token of each document, ascending; the last value is the
            length of the stream.
        n_bytes: number of UTF-8 bytes of the text.
        n_unknown: number of tokens that stand for characters outside the vocabulary.
        weights: the loss weight of each token, in arrays of the same lengths as `shards`, float32;
            None: 1 for each.
        values: a number for each document that the objective uses, float32; None: none.
        group: number of consecutive documents that belong together, such as 2 for pairs.

    Attributes:
        reference: the reference model's log-probability of each document, float64, NaN where it is
            not computed; None: not needed.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[np.ndarray],
        ends: npt.NDArray[np.int64],
        n_bytes: int = 0,
        n_unknown: int = 0,
        *,
        weights: Sequence[np.ndarray] | None = None,
        values: npt.NDArray[np.float32] | None = None,
        group: int = 1,
    ) -> None:
        self.name = name
        self.ends = ends
        self.n_bytes = n_bytes
        self.n_unknown = n_unknown
        self.values = values
        self.group = group
        self.reference: npt.NDArray[np.float64] | None = None
        self._shards = shards
        self._weights = weights
        self._starts = [0, *accumulate(len(shard) for shard in shards)]
        assert (ends[-1] if len(ends) else 0) == len(self), "a document has no end"

    @classmethod
    def of_shards(
        cls, name: str, shards: "Sequence[Shard]", n_bytes: int, n_unknown: int, group: int
    ) -> "TokenStream":
        """Make a stream of consecutive shards."""
        tokens = [shard.tokens for shard in shards]
        starts = [0, *accumulate(map(len, tokens))]
        ends = [shard.ends + start for shard, start in zip(shards, starts, strict=False)]
        weights = [shard.weights for shard in shards if shard.weights is not None]
        values = [shard.values for shard in shards if shard.values is not None]
        return cls(
            name,
            tokens,
            np.concatenate([np.zeros(0, np.int64), *ends]),
            n_bytes,
            n_unknown,
            weights=weights or None,
            values=np.concatenate(values) if values else None,
            group=group,
        )

    def __len__(self) -> int:
        """Number of tokens."""
        return self._starts[-1]

    @property
    def n_documents(self) -> int:
        return len(self.ends)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the tokens `start:stop`; the range must be inside the stream.

        Raises:
            WorkhorseError: a memory-mapped file has been truncated.
        """
        tokens = np.empty(stop - start, dtype=np.int64)
        self._read(self._shards, start, tokens)
        return tokens

    @property
    def weighted(self) -> bool:
        """True if tokens have loss weights."""
        return self._weights is not None

    def read_weights(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return the loss weights of the tokens `start:stop`."""
        weights = np.ones(stop - start, dtype=np.float32)
        if self._weights is not None:
            self._read(self._weights, start, weights)
        return weights

    def _read(self, shards: Sequence[np.ndarray], start: int, into: np.ndarray) -> None:
        """Copy a range of an array that is split into shards."""
        stop = start + len(into)
        assert 0 <= start <= stop <= len(self), f"tokens {start} to {stop} of {len(self)}"
        position = start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            first = self._starts[index]
            last = min(stop, self._starts[index + 1])
            shard = shards[index]
            _check_whole(shard)
            into[position - start : last - start] = shard[position - first : last - first]
            position = last


def _check_whole(shard: np.ndarray) -> None:
    """Raise an error if the memory-mapped file of a shard was truncated.

    Without this check, reading past the file's end would kill the process.
    """
    if not isinstance(shard, np.memmap):
        return
    mapped: Any = shard.base
    if isinstance(mapped, mmap) and mapped.size() < len(mapped):
        raise WorkhorseError(
            f"{shard.filename} was truncated while it was in use: it has {mapped.size()} of "
            f"{len(mapped)} bytes; restore it, or run workhorse data prepare again"
        )


_verified: set[tuple[str | int, ...]] = set()
"""Files whose checksum this process has verified: (checksum, device, inode, size, mtime, ctime)."""


@dataclass(frozen=True)
class Split:
    """The training or validation split: one token stream per source, and the training weights."""

    name: str
    streams: tuple[TokenStream, ...]
    weights: tuple[float, ...]

    @property
    def n_tokens(self) -> int:
        return sum(len(stream) for stream in self.streams)

    @property
    def n_documents(self) -> int:
        return sum(stream.n_documents for stream in self.streams)

    @property
    def n_bytes(self) -> int:
        """Number of UTF-8 bytes of the text."""
        return sum(stream.n_bytes for stream in self.streams)

    @property
    def weighted(self) -> bool:
        """True if tokens have loss weights."""
        return any(stream.weighted for stream in self.streams)

    @property
    def group(self) -> int:
        """Number of consecutive documents that belong together, such as 2 for pairs."""
        return max(stream.group for stream in self.streams)

    @property
    def unknown_rate(self) -> float:
        """Fraction of the tokens that stand for characters outside the tokenizer's vocabulary."""
        return sum(stream.n_unknown for stream in self.streams) / self.n_tokens


@dataclass(frozen=True)
class Dataset:
    """A prepared data set; `folder` contains the shards and the manifest."""

    folder: Path
    manifest: ManifestConfig
    train: Split
    validation: Split | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all tokens. Data sets with equal fingerprints have the same tokens."""
        return self.manifest.fingerprint

    def verify(self) -> None:
        """Read every shard and compare its SHA-256 with the manifest.

        Raises:
            WorkhorseError: a shard is missing or damaged.
        """
        for split in (self.manifest.train, self.manifest.validation):
            for stream in split.values():
                for shard in stream.shards:
                    check_sums(self.folder, shard, again=True)


def mostly_held_out(dataset: Dataset) -> str | None:
    """Return a warning if the validation split is larger than the training split, else None."""
    if dataset.validation is None or dataset.validation.n_tokens <= dataset.train.n_tokens:
        return None
    return (
        f"the validation split has {dataset.validation.n_tokens:,} tokens and the training split "
        f"{dataset.train.n_tokens:,}, because only whole documents are held out; add documents, or "
        "set data.corpus.validation to other files"
    )


def unknown_text(dataset: Dataset) -> str | None:
    """Return a warning if the text has characters or words outside the vocabulary, else None."""
    splits = [split for split in (dataset.train, dataset.validation) if split is not None]
    unknown = sum(stream.n_unknown for split in splits for stream in split.streams)
    if not unknown:
        return None
    tokens = sum(split.n_tokens for split in splits)
    return (
        f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.2%}) are unknown: the model "
        "cannot learn their text, and they make its loss and bits per byte too low; use a "
        "tokenizer with byte tokens (kind: bpe, or byte_fallback: true)"
    )


def skipped_records(dataset: Dataset) -> str | None:
    """Return a line about the records that are skipped, else None."""
    splits = (dataset.manifest.train, dataset.manifest.validation)
    shards = [shard for streams in splits for one in streams.values() for shard in one.shards]
    errors = [shard.error for shard in shards if shard.error]
    count = sum(shard.skipped for shard in shards)
    return f"{count:,} records are skipped, the first because of {errors[0]}" if errors else None


def open_dataset(folder: Path, weights: Mapping[str, float] | None = None) -> Dataset:
    """Open a data set that `prepare` wrote, without reading its sources.

    Args:
        folder: folder of the data set, `Dataset.folder`.
        weights: training weights by source; the default for each source is 1.

    Raises:
        WorkhorseError: the folder has no data set, its preparation was not finished, or a shard is
            damaged. Checksums are compared when this process first opens a shard;
            `Dataset.verify` compares them again.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise WorkhorseError(
            f"{folder} is incomplete: its preparation was interrupted; "
            "run workhorse data prepare again"
        )

    def stream_of(source: str, stream: StreamConfig) -> TokenStream:
        shards = [open_shard(folder, shard) for shard in stream.shards]
        group = 2 if manifest.sources[source].get("rows") == "pairs" else 1
        return TokenStream.of_shards(source, shards, stream.bytes, stream.unknown, group)

    def split(name: str, streams: Mapping[str, StreamConfig]) -> Split:
        return Split(
            name,
            tuple(stream_of(*named) for named in streams.items()),
            tuple((weights or {}).get(source, 1.0) for source in streams),
        )

    validation = split("validation", manifest.validation) if manifest.validation else None
    return Dataset(folder, manifest, split("train", manifest.train), validation)


class Shard(NamedTuple):
    """The arrays of one shard. The optional ones are missing in all shards of a stream, or none."""

    tokens: np.ndarray
    """The tokens, unsigned integers."""
    ends: np.ndarray
    """The ends of its documents, as positions in the shard."""
    weights: np.ndarray | None = None
    """The weight of each token, float32."""
    values: np.ndarray | None = None
    """The value of each document that ends in the shard, float32."""


def open_shard(folder: Path, shard: ShardConfig) -> Shard:
    """Open one shard; tokens and weights are memory-mapped.

    Raises:
        WorkhorseError: a file is missing, truncated, too long, or changed.
    """
    lengths = {
        "tokens": shard.tokens,
        "ends": shard.documents,
        "weights": shard.tokens,
        "values": shard.documents,
    }
    arrays = {name: open_array(shard.path(folder, name), lengths[name]) for name in shard.checksums}
    check_sums(folder, shard)
    return Shard(**arrays | {"ends": np.array(arrays["ends"], dtype=np.int64)})


def check_sums(folder: Path, shard: ShardConfig, *, again: bool = False) -> None:
    """Compare the SHA-256 of a shard's files with the manifest.

    Unless `again` is True, unchanged files that this process has already checked are skipped.

    Raises:
        WorkhorseError: the checksum of a file differs.
    """
    for array, expected in shard.checksums.items():
        path = shard.path(folder, array)
        with open_plain(path) as file:
            at = os.fstat(file.fileno())
            known = (expected, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
            if known in _verified and not again:
                continue
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise _damaged(path, "its checksum differs")
            _verified.add(known)


def open_array(path: Path, length: int, remedy: str = PREPARE_AGAIN) -> np.ndarray:
    """Open a file of `write_array` with `length` values, without reading it.

    Raises:
        WorkhorseError: the file is missing or damaged; the message ends with the remedy.
    """
    if path.exists() and not path.is_file():
        raise _damaged(path, "it is not a plain file", remedy)
    try:
        # An empty array cannot be memory-mapped.
        array = np.load(path, mmap_mode="r" if length else None, allow_pickle=False)
    except FileNotFoundError:
        raise _damaged(path, "it is missing", remedy) from None
    except (ValueError, EOFError) as error:
        raise _damaged(path, str(error), remedy) from None
    offset = array.offset if isinstance(array, np.memmap) else None
    whole = offset is None or path.stat().st_size == offset + array.nbytes
    if array.shape != (length,) or not whole:
        raise _damaged(path, f"it has {array.size} values instead of {length}", remedy)
    return array


def _damaged(path: Path, reason: str, remedy: str = PREPARE_AGAIN) -> WorkhorseError:
    return WorkhorseError(f"{path} is damaged: {reason}; {remedy}")
