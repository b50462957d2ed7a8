"""Reads the documents of each kind of source and assigns them to the splits.

A document is held out for validation if its hash is below a threshold. The hash depends only on the
document, so adding or removing a document does not move others to another split. The threshold
follows from the configured fraction. It depends on the documents only if a split would be empty.

Only one document is in memory at a time, and a long one is read in pieces, so a text file may be
larger than memory.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workhorse.data import stdlib
from workhorse.data.config import (
    STDIN,
    ConversationsConfig,
    DataConfig,
    FolderConfig,
    Generated,
    JsonlConfig,
    ParquetConfig,
    SourceConfig,
    StdlibConfig,
    TaskConfig,
    TextConfig,
)
from workhorse.data.conversations import Example, record_of, without_nulls
from workhorse.data.files import (
    Advice,
    check_files,
    existing_file,
    glob_of_texts,
    read_text,
    source_files,
    stdin_copy,
    visible_files,
)
from workhorse.data.records import PARQUET_ROWS, json_lines, object_of, parquet_file, text_records
from workhorse.data.tasks import examples
from workhorse.errors import WorkhorseError

HASHES = 2**64


def hash_of(identity: str) -> int:
    """Return a 64-bit hash of a string that is the same on every machine."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def threshold(fraction: float, records: Iterable[tuple[str, Iterable[object]]]) -> float:
    """Return the hash below which documents are held out for validation.

    The threshold is `fraction * 2^64`, unless this leaves one of the splits empty. In that case it
    is changed so that the empty split gets one document: the document with the smallest hash for
    validation, or the one with the largest hash for training.

    Args:
        fraction: fraction of the documents to hold out; with 0 no documents are read.
        records: the identity of each record, which is the string that is hashed, and its parts.
            Records are read until both splits have one. A record without parts does not count.
    """
    asked = fraction * HASHES
    smallest, largest = HASHES, -1
    for identity, parts in records if asked else ():
        number = hash_of(identity)
        if (number < smallest or number > largest) and any(parts):
            smallest, largest = min(smallest, number), max(largest, number)
            if smallest < asked <= largest:
                return asked
    if smallest >= largest:  # no document, or only one: its hash decides its split
        return asked
    return smallest + 1 if smallest >= asked else largest


SplitName = Literal["train", "validation"]

PIECE_CHARS = 1 << 18
"""Maximum number of characters of a document that are read and encoded at once."""

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = {
    "jsonl": JSONL_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "conversations": JSONL_SUFFIXES + PARQUET_SUFFIXES,
}
"""Names of the files that each kind of source reads in a folder."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a piece of a document that is longer than `PIECE_CHARS` characters.

    `begins` is True for the first piece of a document, `ends` for the last.
    """

    name: str
    text: str
    begins: bool = True
    ends: bool = True
    example: Example | None = None
    """A conversation; `text` then holds the contents of its messages."""
    others: tuple[Example, ...] | None = None
    """The other conversations of the record, which is skipped if one cannot be encoded; None: that
    is an error."""
    error: str = ""
    """The error for which the record is skipped; empty if there is none."""


def read_documents(
    source: SourceConfig, split: SplitName, *, key: str | None = None
) -> Iterator[Document]:
    """Read the documents of one split of a source in a fixed order; empty documents are skipped.

    A document of more than `PIECE_CHARS` characters is read in pieces. They are cut at the start of
    a line if possible, because most tokenizers also split there. `key` is the source's key in the
    recipe, for error messages.

    Raises:
        WorkhorseError: a file is missing, damaged or not text, has bytes that are not UTF-8, or
            lacks the text field.
    """
    advice = _advice(source, key)
    if isinstance(source, TextConfig) and source.documents is None:
        yield from _read_text_file(source, split, advice)
        return
    below = None  # the splits are separate files
    if isinstance(source, Generated) or source.validation is None:
        records = _records(source, split, advice)
        usable = ((one, (not part.error for part in parts)) for one, parts in records)
        below = threshold(source.held_out, usable)
    elsewhere: set[str] = set()
    if isinstance(source, ConversationsConfig) and source.overlap == "drop" and split == "train":
        elsewhere = _identities(source, "validation", advice)
    for identity, documents in _records(source, split, advice):
        wanted = below is None or (hash_of(identity) < below) == (split == "validation")
        if wanted and identity not in elsewhere:
            yield from documents


def iterate_documents(config: DataConfig, split: SplitName = "train") -> Iterator[str]:
    """Yield the text of a split, source by source, in strings of up to `PIECE_CHARS` characters."""
    for name, source in config.sources.items():
        for document in read_documents(source, split, key=config.key_of(name)):
            yield document.text


def check_text_files(config: DataConfig) -> None:
    """Check that all text files of a corpus are UTF-8 text. Only their first bytes are read.

    Raises:
        WorkhorseError: a file is not UTF-8 text.
    """
    for name, source in config.sources.items():
        check_source_files(source, key=config.key_of(name))


def check_source_files(source: SourceConfig, *, key: str | None = None) -> None:
    """Check that all text files of a source are UTF-8 text. Only their first bytes are read.

    `key` is the source's key in the recipe, for error messages.

    Raises:
        WorkhorseError: a file is not UTF-8 text.
    """
    if not isinstance(source, Generated | ParquetConfig) and not of_stdlib(source):
        files = [path for path in all_files(source) if path.suffix not in PARQUET_SUFFIXES]
        check_files(files, source.errors, _advice(source, key))


def of_stdlib(source: SourceConfig) -> bool:
    """Return True if a source has questions about the standard library."""
    return isinstance(source, ConversationsConfig) and source.of_stdlib


def _advice(source: SourceConfig, key: str | None) -> Advice:
    if not isinstance(source, FolderConfig):
        return Advice(key)
    return Advice(key, lambda: glob_of_texts(all_files(source)))


def all_files(source: SourceConfig) -> list[Path]:
    """Return the files of both splits of a source."""
    files = data_files(source, "train")
    if not isinstance(source, Generated) and source.validation is not None:
        files = [*files, *data_files(source, "validation")]
    return files


def data_files(source: SourceConfig, split: SplitName) -> list[Path]:
    """Return the files of one split of a source, in order; empty if the source has no such split.

    If the splits share files, all of these files are returned for each split.
    """
    if isinstance(source, TaskConfig):
        return []
    if isinstance(source, StdlibConfig) or of_stdlib(source):
        return [module.path for module in stdlib.candidates()]
    if split == "validation" and not source.has_validation:
        return []
    path = source.path if split == "train" else source.validation or source.path
    match source:
        case TextConfig():
            return [stdin_copy() if path == STDIN else existing_file(path)]
        case FolderConfig():
            return visible_files(path, source.glob)
        case JsonlConfig() | ParquetConfig() | ConversationsConfig():
            return source_files(path, SUFFIXES[source.kind])


def overlap_of(source: SourceConfig) -> int:
    """Count the training records of a source that are also in its file for validation."""
    if not isinstance(source, ConversationsConfig) or source.validation is None:
        return 0
    advice = _advice(source, None)
    held_out = _identities(source, "validation", advice)
    return sum(identity in held_out for identity, _ in _records(source, "train", advice))


def _identities(source: ConversationsConfig, split: SplitName, advice: Advice) -> set[str]:
    return {identity for identity, _ in _records(source, split, advice)}


def _fields(
    source: ConversationsConfig, files: Iterable[Path], advice: Advice
) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Yield (place, line or fields) of each record of JSON Lines and Parquet files."""
    if source.of_stdlib:
        yield from stdlib.questions(source.rows)
        return
    for path in files:
        if path.suffix not in PARQUET_SUFFIXES:
            yield from json_lines(path, "strict", advice)
            continue
        with parquet_file(path) as file:
            batches = file.iter_batches(PARQUET_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows):
                # The columns of a file have the fields of all its records.
                yield f"{path}:{number}", without_nulls(row)


def _read_text_file(source: TextConfig, split: SplitName, advice: Advice) -> Iterator[Document]:
    for path in data_files(source, split):
        first, last = 0, None
        if source.held_out > 0:
            # Count the characters in a first pass: the cut depends on their total.
            characters = sum(len(block) for block in read_text(path, source.errors, advice))
            cut = int((1 - source.held_out) * characters)
            first, last = (0, cut) if split == "train" else (cut, characters)
        yield from _in_pieces(
            str(source.path), _characters(read_text(path, source.errors, advice), first, last)
        )


Records = Iterator[tuple[str, Iterable[Document]]]
"""The identity of each record and its documents. The hash of the identity decides the split."""


def _records(source: SourceConfig, split: SplitName, advice: Advice) -> Records:
    """Yield all records in the files of a split, of any source but one text file."""
    files = data_files(source, split)
    match source:
        case ConversationsConfig():
            for where, given in _fields(source, files, advice):
                try:
                    fields = object_of(given, where) if isinstance(given, str) else given
                    record = record_of(fields, source.rows, where, source.learn)
                except WorkhorseError as error:
                    if source.on_error == "stop":
                        raise
                    yield where, [Document(where, "", example=Example(), error=str(error))]
                    continue
                skips, both = source.on_error == "skip", record.examples  # or only one
                others = (both[1 - n : 2 - n] if skips else None for n in range(len(both)))
                yield record.identity, [*map(_example, [where] * len(both), both, others)]
        case TaskConfig():
            for strings in examples(source.task, source.count, source.difficulty, source.seed):
                yield strings[0], [_example(strings[0], Example(strings=strings))]
        case _:
            for identity, name, blocks in _texts(source, split, files, advice):
                yield identity, _in_pieces(name, blocks)


def _example(name: str, example: Example, others: tuple[Example, ...] | None = None) -> Document:
    return Document(name, example.text, example=example, others=others)


def _texts(
    source: SourceConfig, split: SplitName, files: Iterable[Path], advice: Advice
) -> Iterator[tuple[str, str, Iterable[str]]]:
    """Yield (identity, name, text blocks) of every document in the files of a split.

    A file of a folder is read only when its text blocks are iterated.
    """
    match source:
        case StdlibConfig():
            for module in stdlib.modules():
                yield module.name, module.name, map(stdlib.Module.text, [module])
        case FolderConfig():
            root = source.path if split == "train" else source.validation or source.path
            for path in files:
                name = path.relative_to(root).as_posix()
                yield name, name, read_text(path, source.errors, advice)
        case JsonlConfig() | ParquetConfig() | TextConfig():
            for path in files:
                for name, text in text_records(path, source, advice):
                    yield text, name, [text]
        case _:
            raise AssertionError(source.kind)


def _characters(blocks: Iterable[str], first: int, last: int | None) -> Iterator[str]:
    """Yield the characters `first:last` of the concatenated blocks; `last` None: to the end."""
    position = 0
    for block in blocks:
        start = max(first - position, 0)
        stop = len(block) if last is None else min(max(last - position, 0), len(block))
        if start < stop:
            yield block[start:stop]
        position += len(block)


def _in_pieces(name: str, blocks: Iterable[str]) -> Iterator[Document]:
    begins, held = True, ""
    for block in blocks:
        held += block
        while len(held) > PIECE_CHARS:
            cut = _line_start(held, PIECE_CHARS)
            yield Document(name, held[:cut], begins, ends=False)
            begins, held = False, held[cut:]
    if held:
        yield Document(name, held, begins)


def _line_start(text: str, limit: int) -> int:
    """Return the position, up to `limit`, at which to cut a text.

    This is the start of the last line that is not indented and does not follow a blank line, since
    most tokenizers also split there; `limit` if there is no such line.
    """
    end = limit
    while (end := text.rfind("\n", 0, end)) > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
    return limit
