"""Files that are not UTF-8 text: what they are by their leading bytes, and what to do with them."""

import codecs
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workhorse.errors import WorkhorseError

HEAD_BYTES = 4096
"""Leading bytes of a file (decompressed) that are looked at."""

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
"""Kinds of file that are not text, by a pattern for their first bytes that no prose begins with."""

MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is the beginning of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Encodings by their byte order marks."""

CONTROL = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1b"))
"""Bytes that plain text does not have."""
MOST_CONTROL = 0.05
"""Share of them above which bytes are not text; of random bytes it is 0.1."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The remedies in messages about the files of a source."""

    key: str | None = None
    """The source's key in the recipe; None if the command at hand has no recipe."""
    glob: Callable[[], str | None] | None = None
    """Finds a pattern that only texts match; None unless the source is a folder of texts."""

    def mend(self, what: str) -> str:
        """The remedy for bytes that are not UTF-8."""
        return what if self.key is None else f"{what}, or set {self.key}.errors=replace"

    def leave_out(self) -> str:
        """The remedy for a file that is not text."""
        if self.glob is None:
            return "name a text file"
        pattern = self.glob() if self.key else None
        if pattern is None:
            return "move it out of the folder"
        return f"leave it out with {self.key}.glob='{pattern}'"

    def other_field(self, names: str) -> str:
        """The remedy for a record without the field that is read; `names` says which it has."""
        if self.key is None:
            return f"rename the one with the text ({names})"
        return f"choose another with {self.key}.text_field ({names})"


def check_head(path: Path, head: bytes, advice: Advice) -> None:
    """Refuse a file that is not UTF-8 text by its leading bytes, up to `HEAD_BYTES` of them.

    Raises:
        WorkhorseError: it is text in UTF-16 or UTF-32, or a picture, an archive, or other data.
    """
    if encoding := encoding_of(head):
        raise WorkhorseError(f"{path} is {encoding}, not UTF-8; convert it to UTF-8")
    if kind := kind_of(head):
        raise WorkhorseError(f"{path} is {kind}, not text; {advice.leave_out()}")


def encoding_of(head: bytes) -> str | None:
    """UTF-16 or UTF-32 if a text begins like that, with a byte order mark or without."""
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
    """Whether these can be the high bytes of UTF-16: most are of one alphabet, some of ASCII."""
    common, count = Counter(high).most_common(1)[0] if high else (0, 0)
    return common in CONTROL and 2 * count > len(high) and b"\0" in high


def kind_of(head: bytes) -> str | None:
    """The kind of a file that is not text, such as `a PNG picture`; None if it may be text."""
    for pattern, kind in KINDS.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    control = len(head) - len(head.translate(None, CONTROL))
    return "binary data" if b"\0" in head and control > MOST_CONTROL * len(head) else None
