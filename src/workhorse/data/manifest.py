"""The manifest of a prepared data set: the sources, the shards, and checksums."""

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
MANIFEST_BYTES = 100_000_000
"""More bytes than any manifest has; a shard takes four hundred."""


class ShardConfig(Config):
    """One shard: the tokens in `NAME.tokens.npy`, the ends of documents in `NAME.ends.npy`.

    A document may continue in the next shard, which then has its end.
    """

    name: str
    tokens: int
    documents: int
    """Number of documents that end in this shard."""
    bytes: int
    """UTF-8 bytes of the text."""
    pieces: int
    """Pieces of documents read for this shard, which a resumed preparation skips."""
    unknown: int = 0
    """Tokens that stand for characters outside the vocabulary. Data sets from before this was
    counted have 0."""
    tokens_sha256: str
    ends_sha256: str


class StreamConfig(Config):
    """One split of one source."""

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
    """Everything about a data set except the tokens."""

    format: Literal[1] = 1
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    bos: bool
    eos: bool
    sources: dict[str, dict[str, Any]]
    """The config of each source, and the state of its files: files, bytes, a SHA-256."""
    train: dict[str, StreamConfig] = Field(default={})
    """The training stream of each source."""
    validation: dict[str, StreamConfig] = Field(default={})
    """The validation stream of each source that has one."""
    complete: bool = False
    """Whether every shard of every stream is written."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the shards' checksums: equal if every token is equal."""
        sums = {
            split: {
                name: [(shard.tokens_sha256, shard.ends_sha256) for shard in stream.shards]
                for name, stream in sorted(getattr(self, split).items())
            }
            for split in ("train", "validation")
        }
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, self.to_json().encode())


def read_manifest(folder: Path) -> ManifestConfig:
    """The manifest of a data set.

    Raises:
        WorkhorseError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise WorkhorseError(f"{folder} holds no prepared data; run workhorse data prepare")
    try:
        return ManifestConfig.from_json(read_text(path, limit=MANIFEST_BYTES))
    except WorkhorseError as error:
        raise WorkhorseError(
            f"{path} is damaged ({error}); delete {folder} and prepare it again"
        ) from None


def write_array(path: Path, array: np.ndarray) -> str:
    """Write an array as `.npy`, whole or not at all; returns the SHA-256 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomically(path, buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).hexdigest()
