"""Finds, decompresses and decodes the text files of a corpus."""

import atexit
import codecs
import functools
import gzip
import io
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from workhorse.data.config import STDIN
from workhorse.errors import WorkhorseError, shown, to_install
from workhorse.files.text_formats import open_plain

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

HEAD_BYTES = 4096
"""Number of bytes at the start of a file, after decompression, checked to see if it is text."""

KINDS = {
    rb"\x89PNG": "a PNG picture",
    rb"\xff\xd8\xff": "a JPEG picture",
    rb"GIF8[79]a.{0,6}\0": "a GIF picture",
    rb"RIFF...[^ -~]WEBP": "a WebP picture",
    rb"II\*\0|MM\0\*": "a TIFF picture",
    rb"BM....\0\0\0\0": "a BMP picture",
    rb"%PDF-\d\.\d[ \t]*[\r\n]": "a PDF",
    rb"\xd0\xcf\x11\xe0": "an old Office document",
    rb"PK\x03\x04": "a ZIP archive",
    rb"\x1f\x8b": "gzip data",
    rb"\x28\xb5\x2f\xfd": "zstd data",
    rb"BZh[1-9]1AY&SY": "bzip2 data",
    rb"\xfd7zXZ\0": "xz data",
    rb"7z\xbc\xaf": "a 7z archive",
    rb"Rar!\x1a\x07": "a RAR archive",
    rb".{257}ustar(\0|  \0)": "a tar archive",
    rb"\x7fELF": "an ELF binary",
    rb"SQLite format 3\0": "an SQLite database",
    rb"PAR1\x15": "a parquet file",
    rb"\x93NUMPY": "a NumPy array",
    rb"\x89HDF": "an HDF5 file",
    rb"GGUF[\1-\3]\0\0\0": "a GGUF file",
    rb"RIFF...[^ -~]WAVE": "WAV audio",
    rb"ID3[\2-\4]": "MP3 audio",
    rb"OggS\0": "Ogg audio",
    rb"\0...ftyp": "MP4 video",
}
"""Names of binary file types, by a regular expression for their first bytes. Text never matches."""

MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is a prefix of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Encodings by byte order mark."""

CONTROL = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1b"))
"""Control bytes that do not occur in plain text."""
MOST_CONTROL = 0.05
"""Fraction of control bytes above which a file with NUL bytes is not text. Random data has 0.1."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Formats the remedies in error messages about the files of a source."""

    key: str | None = None
    """The source's key in the recipe; None if the command has no recipe."""
    glob: Callable[[], str | None] | None = None
    """Function that returns a pattern for the text files of a folder, or None if it finds none.
    Only set for a source that is a folder."""

    def mend(self, what: str) -> str:
        """Return the remedy for bytes that are not UTF-8: do `what`, or set the key `errors`."""
        return what if self.key is None else f"{what}, or set {self.key}.errors=replace"

    def leave_out(self) -> str:
        """Return the remedy for a file that is not text: exclude it from the source."""
        if self.glob is None:
            return "name a text file"
        pattern = self.glob() if self.key else None
        if pattern is None:
            return "move it out of the folder"
        return f"exclude it with {self.key}.glob='{pattern}'"

    def other_field(self, names: str) -> str:
        """Return the remedy for a record without the text field; `names` lists its fields."""
        if self.key is None:
            return f"rename the field with the text ({names})"
        return f"set {self.key}.text_field to another field ({names})"


def check_head(path: Path, head: bytes, advice: Advice) -> None:
    """Check that a file can be UTF-8 text, by its first `HEAD_BYTES` bytes.

    Raises:
        WorkhorseError: the file is UTF-16 or UTF-32 text, a picture, an archive, or other data.
    """
    if encoding := encoding_of(head):
        raise WorkhorseError(f"{path} is {encoding}, not UTF-8; convert it to UTF-8")
    if kind := kind_of(head):
        raise WorkhorseError(f"{path} is {kind}, not text; {advice.leave_out()}")


def encoding_of(head: bytes) -> str | None:
    """Detect UTF-16 and UTF-32, also without a byte order mark.

    Returns:
        "UTF-16" or "UTF-32"; None if the bytes have neither encoding.
    """
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return name
    if b"\0" not in head:
        return None
    for name in ("UTF-32-LE", "UTF-32-BE", "UTF-16-LE", "UTF-16-BE"):
        high = head[1::2] if name.endswith("LE") else head[::2]
        if "16" in name and not _like_high_bytes(high):
            continue
        try:
            text = codecs.getincrementaldecoder(name)().decode(head)
        except UnicodeDecodeError:
            continue
        if text and all(letter.isprintable() or letter.isspace() for letter in text):
            return name[:6]
    return None


def _like_high_bytes(high: bytes) -> bool:
    """Return True if these can be the high bytes of UTF-16 text.

    Most characters of a text are of one alphabet, so they have the same high byte. Others, such as
    spaces, are ASCII, with a high byte of 0.
    """
    common, count = Counter(high).most_common(1)[0] if high else (0, 0)
    return common in CONTROL and 2 * count > len(high) and b"\0" in high


def kind_of(head: bytes) -> str | None:
    """Return the type of a binary file, such as `a PNG picture`; None if the file can be text."""
    for pattern, kind in KINDS.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    control = len(head) - len(head.translate(None, CONTROL))
    return "binary data" if b"\0" in head and control > MOST_CONTROL * len(head) else None


BLOCK_BYTES = 1 << 20
"""Number of bytes read at a time."""

ZSTD_BYTES = 1 << 10
"""Number of bytes passed to zstd at a time. They expand to 32 MiB or less."""

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def source_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file at `path`, or a folder's files with these suffixes, without hidden files.

    The path `-` is the standard input.

    Raises:
        WorkhorseError: the path does not exist, or the folder has no such file.
    """
    if path == STDIN:
        return [stdin_copy()]
    if not path.is_dir():
        return [existing_file(path)]
    files = visible_files(path, "**/*")
    found = [file for file in files if file.name.endswith(suffixes)]
    if not found:
        raise WorkhorseError(f"no {' or '.join(suffixes)} file in {path}; name another folder")
    return found


def visible_files(folder: Path, glob: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted by path, without hidden files.

    Raises:
        WorkhorseError: the path is not a folder, the pattern is invalid, the folders are nested
            thousands deep, or a folder cannot be read.
    """
    if not folder.is_dir():
        if folder.exists():
            kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(folder.suffix, "text")
            raise WorkhorseError(f"{folder} is not a folder; use kind: {kind} for one file")
        raise WorkhorseError(f"the folder {_place(folder)} does not exist; check the path")
    try:
        matches = list(folder.glob(glob))
        for searched in _searched(folder, glob):
            if not os.access(searched, os.R_OK | os.X_OK):
                raise WorkhorseError(
                    f"cannot read the folder {searched}: permission denied; change its "
                    "permissions, or exclude it from the pattern (glob)"
                )
    except RecursionError:
        raise WorkhorseError(
            f"the folders in {folder} are nested too deeply to search for {shown(glob)}; "
            "name a folder further down"
        ) from None
    except (ValueError, IndexError, NotImplementedError) as error:
        raise WorkhorseError(
            f"glob={shown(glob)} is not a valid pattern: {error}; correct it"
        ) from None
    relative = sorted((match.relative_to(folder).as_posix(), match) for match in matches)
    return [
        file
        for name, file in relative
        if file.is_file() and not any(part.startswith(".") for part in name.split("/"))
    ]


def _searched(folder: Path, glob: str) -> Iterator[Path]:
    """Yield the visible folders in `folder` that can contain files matching a pattern."""
    yield folder
    parts = glob.split("/")
    for depth in range(1, len(parts)):
        for match in folder.glob("/".join(parts[:depth])):
            hidden = any(part.startswith(".") for part in match.relative_to(folder).parts)
            if match.is_dir() and not match.is_symlink() and not hidden:
                yield match


def _place(path: Path) -> str:
    """Format a path for messages; a relative path is followed by the working directory."""
    return str(path) if path.is_absolute() else f"{path} in {Path.cwd()}"


def existing_file(path: Path) -> Path:
    """Return `path`, or raise a one-line error if it is not an existing plain file."""
    if path.is_dir():
        raise WorkhorseError(
            f"{path} is a folder; name a file in it, or use a recipe with kind: folder"
        )
    if not path.exists():
        raise WorkhorseError(f"the file {_place(path)} does not exist; check the path")
    if not path.is_file():
        raise WorkhorseError(f"{path} is a pipe or device; name a file, or - for stdin")
    return path


@functools.cache
def _stdin_file() -> IO[bytes]:
    copy = tempfile.NamedTemporaryFile(prefix="workhorse-stdin-")  # noqa: SIM115 (lives until exit)
    shutil.copyfileobj(sys.stdin.buffer, copy)
    copy.flush()
    atexit.register(copy.close)
    return copy


def stdin_copy() -> Path:
    """Copy the standard input to a temporary file and return the file's path.

    A corpus is read several times, but the standard input can be read only once.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise WorkhorseError(
            "the corpus is the standard input, but that is a terminal; pipe text into it"
        )
    return Path(_stdin_file().name)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes. A gzip or zstd file is decompressed.

    Raises:
        WorkhorseError: the file cannot be read, or its compression is damaged.
    """
    try:
        with open_plain(path) as file:
            magic = file.peek(len(ZSTD_MAGIC))
            if magic.startswith(GZIP_MAGIC):
                with gzip.open(file) as stream:
                    yield stream  # pyright: ignore[reportReturnType]
            elif magic.startswith(ZSTD_MAGIC):
                with _unzstd(file, path) as stream:
                    yield stream
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WorkhorseError(f"{path} is damaged: {error}; download it again") from None
    except OSError as error:
        raise WorkhorseError(
            f"cannot read {path}: {error.strerror or error}; check the disk"
        ) from None


@contextmanager
def _unzstd(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    try:
        import zstandard
    except ImportError:
        raise WorkhorseError(
            f"{path} is compressed with zstd, which needs the package zstandard; "
            f"{to_install('data')}"
        ) from None
    try:
        frames = _Blocks(_zstd_content(file, zstandard.ZstdDecompressor()))
        with io.BufferedReader(frames, BLOCK_BYTES) as stream:
            yield stream
    except zstandard.ZstdError as error:
        raise WorkhorseError(f"{path} is damaged: {error}; download it again") from None


def _zstd_content(file: BinaryIO, library: "ZstdDecompressor") -> Iterator[bytes]:
    """Decompress concatenated zstd frames.

    The library's own reader does not report a file that ends inside a frame.
    """
    frame, left = None, b""
    while data := left or file.read(ZSTD_BYTES):
        frame = frame or library.decompressobj()
        yield frame.decompress(data)
        left = frame.unused_data
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError("the file ends inside a zstd frame")


class _Blocks(io.RawIOBase):
    """A file object that reads from an iterator of byte blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._held:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._held = memoryview(block)
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size


def check_files(paths: Iterable[Path], errors: str, advice: Advice) -> None:
    """Check the first bytes of all text files before any file is read completely.

    Raises:
        WorkhorseError: the first bytes of a file show that it is not text or has another encoding;
            or they are not UTF-8 and `errors` is not "replace".
    """
    for path in paths:
        with open_bytes(path) as file:
            head = file.read(HEAD_BYTES)
        final = len(head) < HEAD_BYTES
        check_head(path, head, advice)
        try:
            codecs.getincrementaldecoder("utf-8")(errors).decode(head, final)
        except UnicodeDecodeError as error:
            raise bad_byte(path, error, 0, advice) from None


def glob_of_texts(paths: Iterable[Path]) -> str | None:
    """Return a glob pattern for the most common file suffix that only text files have, if any."""
    texts: Counter[str] = Counter()
    others: set[str] = set()
    for path in paths:
        try:
            with open_bytes(path) as file:
                is_text = kind_of(file.read(HEAD_BYTES)) is None
        except WorkhorseError:
            is_text = False
        if is_text:
            texts[path.suffix] += 1
        else:
            others.add(path.suffix)
    kept = (suffix for suffix, _ in texts.most_common() if suffix and suffix not in others)
    return next((f"**/*{suffix}" for suffix in kept), None)


def read_text(path: Path, errors: str, advice: Advice) -> Iterator[str]:
    """Read a UTF-8 file block by block, as strings.

    Line ends are kept, and a byte order mark is removed.

    Raises:
        WorkhorseError: the first bytes show that the file is not text or has another encoding; or a
            byte is not UTF-8 and `errors` is not "replace". The message has the byte's offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0
    with open_bytes(path) as file:
        while True:
            block = file.read(BLOCK_BYTES)
            if not offset:
                check_head(path, block[:HEAD_BYTES], advice)
            held_back = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise bad_byte(path, error, offset - held_back, advice) from None
            if text := text if offset else text.removeprefix("\ufeff"):
                yield text
            if not block:
                return
            offset += len(block)


def bad_byte(
    where: object,
    error: UnicodeDecodeError,
    offset: int,
    advice: Advice,
    mend: str = "convert the file to UTF-8",
) -> WorkhorseError:
    """Return the error for a byte that is not UTF-8.

    Args:
        where: the file, or the line or row of the file, for the message.
        error: the error of the decoder.
        offset: position in the file of the first byte that was passed to the decoder.
        advice: formats the remedy.
        mend: how to correct the data.
    """
    return WorkhorseError(
        f"{where}: byte 0x{error.object[error.start]:02x} at offset {offset + error.start} is not "
        f"UTF-8; {advice.mend(mend)}"
    )
