"""Reads the header of an untrusted GGUF file: its keys, and the position of each tensor.

    "GGUF", version, number of tensors, number of keys
    for each key: its name, a type, a value
    for each tensor: its name, its shape (fastest axis first), a type, the offset of its bytes

Numbers are little-endian. A string is its length in 64 bits followed by UTF-8. The tensors' bytes
start at the next multiple of the alignment. Format: ggml-org/ggml, docs/gguf.md.
"""

import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import collector_paused, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 * 2**20
"""Maximum size of a header in bytes. The largest known headers need half of it."""
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_VALUES = 3_000_000
"""Maximum number of elements of all lists together. The largest known vocabulary needs half."""
MAX_NAME = 256
MAX_RANK = 4
ALIGNMENT = "general.alignment"
ALIGNMENTS = tuple(1 << power for power in range(3, 21))

NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""Format characters of the `struct` module by GGUF's numeric value types."""
TEXT, LIST = 8, 9

BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ1_S": (256, 50),
    "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
}  # fmt: skip
"""Supported tensor types, each with the number of elements and of bytes in a block."""
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of ggml's tensor types by number."""
_DAMAGED = "the file may be damaged: download it again"


class StoredTensor(NamedTuple):
    """A tensor in a GGUF file. Its bytes are at positions `begin` to `end - 1` of the file."""

    kind: str
    """The tensor type, a key of `BLOCKS`."""
    shape: tuple[int, ...]
    """The shape with the fastest axis last, as in PyTorch."""
    begin: int
    end: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file: values by key, and tensors by name."""

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf_header(file: BinaryIO, path: Path) -> GgufHeader:
    """Read the header of a GGUF file, without the tensors' bytes.

    Args:
        file: the file, opened unbuffered for reading, at its start.
        path: the file's name in error messages.

    Raises:
        WorkhorseError: the file is not a GGUF file, is damaged or truncated, or has an unsupported
            version or tensor type.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        head = file.read(min(size, MAX_HEADER_BYTES)) or b""
    except OSError as error:
        raise unreadable(path, error) from None
    if head[: len(MAGIC)] != MAGIC:
        raise WorkhorseError(f"{path} is not a GGUF file; give one, or the folder of a model")
    try:
        with collector_paused():
            return _parsed(_Reader(head), size)
    except _TooShort:
        reason = (
            "has a header that is too large for a model"
            if size > len(head)
            else f"has {size} bytes, fewer than its header: it is truncated or damaged"
        )
        raise WorkhorseError(f"{path} {reason}; download it again") from None
    except UnicodeDecodeError as error:
        wrong = shown(error.object[error.start : error.start + 1])
        raise WorkhorseError(f"{path}: {wrong} in a string is not UTF-8; {_DAMAGED}") from None
    except _Unsupported as error:
        raise WorkhorseError(f"{path}: {error}") from None
    except ValueError as error:
        raise WorkhorseError(f"{path}: {error}; {_DAMAGED}") from None


class _TooShort(Exception):
    """Error: the bytes that were read end within the header."""


class _Unsupported(Exception):
    """Error: a valid file has an unsupported feature. The message contains the remedy."""


class _Reader:
    """Reads GGUF values from bytes, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.values = 0

    def bytes_(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise _TooShort
        return self.data[begin : self.at]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.bytes_(struct.calcsize(layout)))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        return self.bytes_(self.number("Q")).decode()

    def name(self) -> str:
        length = self.number("Q")
        if not 0 < length <= MAX_NAME:
            raise ValueError(f"a name has {length} bytes, not 1 to {MAX_NAME}")
        name = self.bytes_(length).decode()
        if not name.isprintable():
            raise ValueError(f"{shown(name)} is not a printable name")
        return name

    def value(self) -> Any:
        kind = self.number("I")
        if kind == TEXT:
            return self.text()
        return self.items() if kind == LIST else self.number(_code(kind))

    def items(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        self.values += count
        if self.values > MAX_VALUES:
            raise ValueError(f"the lists have more than {MAX_VALUES} values, too many for a model")
        if kind == TEXT:
            return [self.text() for _ in range(count)]
        return list(self.numbers(_code(kind), count))


def _code(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"values of type {kind}, or nested lists, are not supported")
    return NUMBERS[kind]


def _parsed(reader: _Reader, size: int) -> GgufHeader:
    reader.bytes_(len(MAGIC))
    version = reader.number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:  # bytes are swapped
        raise _Unsupported(
            "big-endian files are not supported; download the little-endian file of the same model"
        )
    if version not in VERSIONS:
        raise _Unsupported(
            f"GGUF version {version} is not supported; use version "
            f"{' or '.join(map(str, VERSIONS))}"
        )
    n_tensors, n_keys = reader.numbers("Q", 2)
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise ValueError(f"{n_tensors} tensors and {n_keys} keys are too many for a model")
    keys: dict[str, Any] = _without_repeats((reader.name(), reader.value()) for _ in range(n_keys))
    entries = _without_repeats((reader.name(), _entry(reader)) for _ in range(n_tensors))
    alignment = keys.get(ALIGNMENT, 32)
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        raise ValueError(f"{ALIGNMENT}={shown(alignment)} is not a power of two from 8 to 2^20")
    data = reader.at + -reader.at % alignment
    return GgufHeader(keys, _placed(entries, data, alignment, size))


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} occurs twice")
        found[name] = value
    return found


def _entry(reader: _Reader) -> tuple[tuple[int, ...], int, int]:
    """Read the shape, type number and offset of one tensor in the header."""
    rank = reader.number("I")
    if not 0 < rank <= MAX_RANK:
        raise ValueError(f"a tensor has {rank} axes, not 1 to {MAX_RANK}")
    shape = tuple(reversed(reader.numbers("Q", rank)))
    return shape, reader.number("I"), reader.number("Q")


def _placed(
    entries: dict[str, tuple[tuple[int, ...], int, int]], data: int, alignment: int, size: int
) -> dict[str, StoredTensor]:
    """Return the tensors sorted by position."""
    at, found = data, dict[str, StoredTensor]()
    for name, (shape, number, offset) in sorted(entries.items(), key=lambda one: one[1][2]):
        kind = TYPES.get(number, f"type {number}")
        if kind not in BLOCKS:
            raise _Unsupported(
                f"tensor {shown(name)} is {kind}, which is not supported; download the same model "
                "in another type, such as Q8_0 or Q4_K_M, or its safetensors files"
            )
        block, block_bytes = BLOCKS[kind]
        begin = data + offset
        end = begin + math.prod(shape) // block * block_bytes
        if shape[-1] % block or offset % alignment or begin < at:
            raise ValueError(f"tensor {shown(name)} has invalid shape {shape} or offset {offset}")
        if end > size:
            raise ValueError(f"truncated: tensor {shown(name)} ends at {end} of {size} bytes")
        found[name] = StoredTensor(kind, shape, begin, end)
        at = end
    return found
