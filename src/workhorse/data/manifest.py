"""The manifest of a prepared data set: its sources, its token shards, and their checksums."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from workhorse.config.base import Config
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import read_text
from workhorse.files.writing import write_atomically

MANIFEST = "manifest.json"
ARRAYS = ("tokens", "ends", "weights", "values")
"""The arrays of a shard; the file of one is `SHARD.ARRAY.npy`."""
MANIFEST_BYTES = 100_000_000
"""Maximum size of a manifest in bytes. Each shard takes about 400 bytes."""


class ShardConfig(Config):
    """One shard: tokens in `NAME.tokens.npy`, end positions of documents in `NAME.ends.npy`.

    If a document continues in the next shard, its end is stored with the next shard.
    """

    name: str
    tokens: int
    documents: int
    """Number of documents that end in this shard."""
    bytes: int
    """Number of UTF-8 bytes of the text."""
    pieces: int
    """Number of documents in this shard, counting each piece of a long document. A resumed
    preparation skips them."""
    unknown: int = 0
    """Number of tokens that stand for characters outside the vocabulary. Always 0 in data sets of
    older versions, which did not count them."""
    skipped: int = 0
    """Number of records that are skipped (`on_error`); `pieces` includes their documents."""
    error: str | None = None
    """The error of the first record that is skipped."""
    tokens_sha256: str
    ends_sha256: str
    weights_sha256: str | None = None
    """Checksum of `NAME.weights.npy`, the loss weight of each token; None: every weight is 1."""
    values_sha256: str | None = None
    """Checksum of `NAME.values.npy`, the number of each document that an objective uses; see
    `Batch.values`. None: there are none."""

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of each file of the shard, by the name of its array."""
        sums = {array: getattr(self, f"{array}_sha256") for array in ARRAYS}
        return {array: value for array, value in sums.items() if value is not None}

    def path(self, folder: Path, array: str) -> Path:
        """The path of the file of an array."""
        return folder / f"{self.name}.{array}.npy"


class StreamConfig(Config):
    """The shards of one split of one source."""

    shards: list[ShardConfig] = Field(default=[])
    complete: bool = False

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def unknown(self) -> int:
        return sum(shard.unknown for shard in self.shards)


class ManifestConfig(Config):
    """The content of a manifest: everything about a data set except its tokens."""

    format: Literal[1] = 1
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    bos: bool
    eos: bool
    sources: dict[str, dict[str, Any]]
    """The config of each source, with the number and total bytes of its files, and a SHA-256 over
    their paths, sizes and modification times."""
    train: dict[str, StreamConfig] = Field(default={})
    """The training token stream of each source."""
    validation: dict[str, StreamConfig] = Field(default={})
    """The validation token stream of each source that has one."""
    complete: bool = False
    """True if all shards of all streams are written."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all shards; equal for data sets with the same tokens."""
        sums = {
            split: {
                name: [tuple(shard.checksums.values()) for shard in stream.shards]
                for name, stream in sorted(getattr(self, split).items())
            }
            for split in ("train", "validation")
        }
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, self.to_json().encode())


def read_manifest(folder: Path) -> ManifestConfig:
    """Read the manifest of a data set.

    Raises:
        WorkhorseError: the folder has no manifest, or the manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise WorkhorseError(f"{folder} has no prepared data; run workhorse data prepare")
    try:
        return ManifestConfig.from_json(read_text(path, limit=MANIFEST_BYTES))
    except WorkhorseError as error:
        raise WorkhorseError(
            f"{path} is damaged ({error}); delete {folder} and prepare it again"
        ) from None


def write_array(path: Path, array: np.ndarray) -> str:
    """Write an array as a `.npy` file, atomically, and return the SHA-256 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomically(path, buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).hexdigest()
