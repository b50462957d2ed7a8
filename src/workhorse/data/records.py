"""Reads the text of each record of JSON Lines and Parquet files, and of divided text files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workhorse.data.config import JsonlConfig, ParquetConfig, TextConfig
from workhorse.data.files import HEAD_BYTES, Advice, bad_byte, check_head, open_bytes, read_text
from workhorse.errors import WorkhorseError, meant, nearest, shown, to_install
from workhorse.files.text_formats import json_fault

if TYPE_CHECKING:
    import pyarrow

PARQUET_ROWS = 1024
LONGEST = 1 << 26
"""Maximum number of characters of a document of a divided text file; it is held in memory."""


def text_records(
    path: Path, source: JsonlConfig | ParquetConfig | TextConfig, advice: Advice
) -> Iterator[tuple[str, str]]:
    """Yield the (name, text) of each record of a file."""
    if isinstance(source, TextConfig):
        texts = enumerate(_divided(path, source, advice), start=1)
        return ((f"{path}:{number}", text) for number, text in texts if text.strip())
    if isinstance(source, JsonlConfig):
        return _read_jsonl(path, source, advice)
    return _read_parquet(path, source, advice)


def _divided(path: Path, source: TextConfig, advice: Advice) -> Iterator[str]:
    """Yield the documents of a text file, divided by `source.documents`."""
    lines = source.documents == "lines"
    separator, held, found = "\n" if lines else str(source.documents), "", lines
    for block in read_text(path, source.errors, advice):
        *texts, held = (held + block).split(separator)
        found = found or bool(texts)
        yield from (text.removesuffix("\r") for text in texts) if lines else texts
        if len(held) > LONGEST:
            break
    if len(held) > LONGEST or (held and not found):
        remedy = meant(separator, ["lines"]) or "use a string that separates its documents"
        if "\\" in separator:
            remedy = r'write \n in double quotes ("\n"), or YAML does not read it as a line end'
        raise WorkhorseError(
            f"{len(held):,} characters of {path} do not contain {advice.key}.documents="
            f"{shown(separator)}; {remedy}"
        )
    yield held


def _read_jsonl(path: Path, source: JsonlConfig, advice: Advice) -> Iterator[tuple[str, str]]:
    for where, line in json_lines(path, source.errors, advice):
        yield where, _text_of(object_of(line, where), source, where, advice)


def json_lines(
    path: Path, errors: Literal["strict", "replace"], advice: Advice
) -> Iterator[tuple[str, str]]:
    """Yield (file and line, string) for each line of a JSON Lines file that is not blank.

    Raises:
        WorkhorseError: a line is not UTF-8.
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
                yield f"{path}:{number}", text


def object_of(line: str, where: str) -> dict[str, Any]:
    """Parse a line of a JSON Lines file.

    Raises:
        WorkhorseError: it is not a JSON object.
    """
    try:
        record = json.loads(line.rstrip())
    except RecursionError:
        raise WorkhorseError(f"{where} is nested too deeply; correct or remove the line") from None
    except ValueError as error:
        fault = json_fault(error)
        raise WorkhorseError(f"{where} is not JSON: {fault}; correct or remove the line") from None
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
