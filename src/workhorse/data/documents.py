"""Reads the documents of each kind of source and assigns them to the splits.

A document is held out for validation if its hash is below a threshold. The hash depends only on the
document, so adding or removing a document does not move others to another split. The threshold
follows from the configured fraction. It depends on the documents only if a split would be empty.

Only one document is in memory at a time, and a long one is read in pieces, so a text file may be
larger than memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workhorse.data import stdlib
from workhorse.data.config import (
    STDIN,
    ConversationsConfig,
    DataConfig,
    FolderConfig,
    JsonlConfig,
    ParquetConfig,
    SourceConfig,
    StdlibConfig,
    TaskConfig,
    TextConfig,
)
from workhorse.data.conversations import Example, Record, record_of
from workhorse.data.files import (
    HEAD_BYTES,
    Advice,
    bad_byte,
    check_files,
    check_head,
    existing_file,
    glob_of_texts,
    open_bytes,
    read_text,
    source_files,
    stdin_copy,
    visible_files,
)
from workhorse.data.tasks import examples
from workhorse.errors import WorkhorseError, nearest, to_install

if TYPE_CHECKING:
    import pyarrow

HASHES = 2**64
GENERATED = StdlibConfig | TaskConfig
"""The sources without a path."""


def hash_of(identity: str) -> int:
    """Return a 64-bit hash of a string that is the same on every machine."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def threshold(fraction: float, documents: Iterable[tuple[str, Iterable[str]]]) -> float:
    """Return the hash below which documents are held out for validation.

    The threshold is `fraction * 2^64`, unless this leaves one of the splits empty. In that case it
    is changed so that the empty split gets one document: the document with the smallest hash for
    validation, or the one with the largest hash for training.

    Args:
        fraction: fraction of the documents to hold out; with 0 no documents are read.
        documents: (identity, text blocks) of each document; the identity is the string that is
            hashed. Documents are read until both splits have one. Empty documents do not count.
    """
    asked = fraction * HASHES
    smallest, largest = HASHES, -1
    for identity, blocks in documents if asked else ():
        number = hash_of(identity)
        if (number < smallest or number > largest) and any(blocks):
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
PARQUET_ROWS = 1024


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
    if isinstance(source, TextConfig):
        yield from _read_text_file(source, split, advice)
        return
    if isinstance(source, TaskConfig):
        yield from _read_task(source, split)
        return
    files = data_files(source, split)
    if isinstance(source, ConversationsConfig):
        yield from _read_conversations(source, split, files, advice)
        return
    below = None  # the splits are separate files
    if isinstance(source, StdlibConfig) or source.validation is None:
        whole = _whole_documents(source, split, files, advice)
        every = ((identity, blocks) for identity, _, blocks in whole)
        below = threshold(source.held_out, every)
    for identity, name, blocks in _whole_documents(source, split, files, advice):
        if below is None or (hash_of(identity) < below) == (split == "validation"):
            yield from _in_pieces(name, blocks)


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
    if not isinstance(source, GENERATED | ParquetConfig) and not of_stdlib(source):
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
    if not isinstance(source, GENERATED) and source.validation is not None:
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


def _read_task(source: TaskConfig, split: SplitName) -> Iterator[Document]:
    made = [*examples(source.task, source.count, source.difficulty, source.seed)]
    below = threshold(source.held_out, ((prompt, [prompt]) for prompt, _ in made))
    for strings in made:
        if (hash_of(strings[0]) < below) == (split == "validation"):
            example = Example(strings=strings)
            yield Document(strings[0], example.text, example=example)


def _read_conversations(
    source: ConversationsConfig, split: SplitName, files: list[Path], advice: Advice
) -> Iterator[Document]:
    """Yield one document per sequence, that is, two per record of `pairs`."""

    def records(files: Iterable[Path]) -> Iterator[Record]:
        for where, fields in _fields(source, files, advice):
            yield record_of(fields, source.rows, where)

    other: set[str] = set()
    below = None
    if source.validation is None:
        every = ((record.identity, [record.identity]) for record in records(files))
        below = threshold(source.held_out, every)
    elif split == "train" and source.overlap == "drop":
        other = {record.identity for record in records(data_files(source, "validation"))}
    for record in records(files):
        held_out = below is not None and hash_of(record.identity) < below
        wanted = below is None or held_out == (split == "validation")
        if wanted and record.identity not in other:
            for example in record.examples:
                yield Document(record.where, example.text, example=example)


def overlap_of(source: SourceConfig) -> int:
    """Count the training records of a source that are also in its file for validation."""
    if not isinstance(source, ConversationsConfig) or source.validation is None:
        return 0
    advice = _advice(source, None)

    def identities(split: SplitName) -> Iterator[str]:
        for where, fields in _fields(source, data_files(source, split), advice):
            yield record_of(fields, source.rows, where).identity

    held_out = set(identities("validation"))
    return sum(identity in held_out for identity in identities("train"))


def _fields(
    source: ConversationsConfig, files: Iterable[Path], advice: Advice
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, fields) of each record of JSON Lines and Parquet files."""
    if source.of_stdlib:
        yield from stdlib.questions(source.rows)
        return
    for path in files:
        if path.suffix not in PARQUET_SUFFIXES:
            yield from json_records(path, "strict", advice)
            continue
        with parquet_file(path) as file:
            batches = file.iter_batches(PARQUET_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield f"{path}:{number}", row


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


def _whole_documents(
    source: FolderConfig | JsonlConfig | ParquetConfig | StdlibConfig,
    split: SplitName,
    files: Iterable[Path],
    advice: Advice,
) -> Iterator[tuple[str, str, Iterable[str]]]:
    """Yield (identity, name, text blocks) of every document in the files of a split.

    The hash of the identity decides the document's split. A file of a folder is read only when its
    text blocks are iterated.
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
        case JsonlConfig() | ParquetConfig():
            for path in files:
                for name, text in _records(path, source, advice):
                    yield text, name, [text]


def _records(
    path: Path, source: JsonlConfig | ParquetConfig, advice: Advice
) -> Iterator[tuple[str, str]]:
    """Yield the (name, text) of each record of a JSON Lines or Parquet file."""
    if isinstance(source, JsonlConfig):
        return _read_jsonl(path, source, advice)
    return _read_parquet(path, source, advice)


def _read_jsonl(path: Path, source: JsonlConfig, advice: Advice) -> Iterator[tuple[str, str]]:
    for where, record in json_records(path, source.errors, advice):
        yield where, _text_of(record, source, where, advice)


def json_records(
    path: Path, errors: Literal["strict", "replace"], advice: Advice
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) for each line of a JSON Lines file that is not blank.

    Raises:
        WorkhorseError: a line is not UTF-8, or not a JSON object.
    """
    offset = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not offset:
                check_head(path, line[:HEAD_BYTES], advice)
            try:
                text = line.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise bad_byte(path, error, offset, advice) from None
            text = text if offset else text.removeprefix("\ufeff")
            offset += len(line)
            if text.strip():
                where = f"{path}:{number}"
                yield where, _object_of(text, where)


def _object_of(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except RecursionError:
        raise WorkhorseError(f"{where} is nested too deeply; correct or remove the line") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]  # without Python's hint, which is for programmers
        raise WorkhorseError(f"{where} is not JSON: {reason}; correct or remove the line") from None
    if not isinstance(record, dict):
        raise WorkhorseError(f"{where} is not a JSON object; write one object per line")
    return record


def _text_of(record: dict[str, Any], source: JsonlConfig, where: str, advice: Advice) -> str:
    if source.text_field not in record:
        remedy = advice.other_field(nearest(source.text_field, record))
        raise WorkhorseError(f"{where} has no field {source.text_field!r}; {remedy}")
    text = record[source.text_field]
    if text is not None and not isinstance(text, str):
        kind = type(text).__name__
        raise WorkhorseError(
            f"{where}: {source.text_field!r} is a {kind}, not a string; correct it"
        )
    text = text or ""
    try:
        return text.encode("utf-8", source.errors).decode()
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(error.object[error.start]):04x}"
        remedy = advice.mend("correct the line")
        raise WorkhorseError(f"{where} has a lone surrogate {lone}; {remedy}") from None


def _read_parquet(path: Path, source: ParquetConfig, advice: Advice) -> Iterator[tuple[str, str]]:
    with parquet_file(path) as file:
        _check_column(path, source.text_field, file.schema_arrow, advice)
        number = 0
        for batch in file.iter_batches(PARQUET_ROWS, columns=[source.text_field]):
            # Decode here: pyarrow does not check that its strings are UTF-8.
            for data in _as_bytes(batch.column(0)).to_pylist():
                where = f"{path}:{number}"
                try:
                    yield where, (data or b"").decode("utf-8", source.errors)
                except UnicodeDecodeError as error:
                    raise bad_byte(where, error, 0, advice, "correct the row") from None
                number += 1


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a Parquet file as pyarrow's `ParquetFile`.

    Raises:
        WorkhorseError: pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise WorkhorseError(
            f"{path} is a parquet file, which needs the package pyarrow; {to_install('data')}"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise WorkhorseError(f"cannot read {path}: {reason}; download it again") from None


def _as_bytes(column: "pyarrow.Array") -> "pyarrow.Array":
    """Convert a column of any of pyarrow's string types to bytes."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type):
        column = column.cast(pyarrow.large_string())
    return column.cast(pyarrow.large_binary())


def _check_column(path: Path, name: str, schema: "pyarrow.Schema", advice: Advice) -> None:
    from pyarrow import types

    if name not in schema.names:
        remedy = advice.other_field(nearest(name, schema.names))
        raise WorkhorseError(f"{path} has no column {name!r}; {remedy}")
    if (count := schema.names.count(name)) > 1:
        raise WorkhorseError(f"{path} has {count} columns named {name!r}; rename all but one")
    kind = schema.field(name).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not any(
        fits(kind)
        for fits in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    ):
        remedy = advice.other_field(f"known: {', '.join(schema.names)}")
        raise WorkhorseError(f"{path}: column {name!r} has the type {kind}, not string; {remedy}")


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
