"""Reading the header of a GGUF file: its full contents, or a one-line error, within limits."""

import re
import struct
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.files import gguf_file
from workhorse.files.gguf_file import StoredTensor, read_gguf_header
from workhorse.files.text_formats import open_contained


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head = start + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32) + data


def read(folder: Path, content: bytes) -> gguf_file.GgufHeader:
    path = folder / "model.gguf"
    path.write_bytes(content)
    with open_contained(folder, path.name) as file:
        return read_gguf_header(file, path)


def test_keys_and_tensors(tmp_path: Path) -> None:
    words = struct.pack("<IQ", 8, 2) + text("a") + text("ü")
    keys = [
        key("general.name", 8, text("tiny")),
        key("x.count", 4, struct.pack("<I", 7)),
        key("x.is", 7, b"\x01"),
        key("x.words", 9, words),
        key("x.signed", 9, struct.pack("<IQ2i", 5, 2, -1, 3)),
    ]
    tensors = [tensor("late", (2, 32), 8, 32), tensor("early", (3,), 0, 0)]
    header = read(tmp_path, file_of(keys, tensors, bytes(100)))
    assert header.keys == {
        "general.name": "tiny",
        "x.count": 7,
        "x.is": True,
        "x.words": ["a", "ü"],
        "x.signed": [-1, 3],
    }
    begin = header.tensors["early"].begin
    assert begin % 32 == 0
    assert header.tensors == {
        "early": StoredTensor("F32", (3,), begin, begin + 12),
        "late": StoredTensor("Q8_0", (2, 32), begin + 32, begin + 100),
    }


HUGE = struct.pack("<Q", 1 << 62)
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file; give one, or the folder of a model"),
    "something else": (b"PK\x03\x04", "is not a GGUF file"),
    "only the start": (b"GGUF\x03", "has 5 bytes, fewer than its header"),
    "version": (file_of([], [], version=9), "GGUF version 9 is not supported; use version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian files are not supported"),
    "counts": (
        b"GGUF" + struct.pack("<I", 3) + HUGE * 2,
        "tensors and .* keys are too many for a model",
    ),
    "long name": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE, "a name has .* bytes, not 1 to"),
    "long text": (file_of([key("a", 8, HUGE)], []), "it is truncated or damaged"),
    "long list": (
        file_of([key("a", 9, struct.pack("<I", 4) + HUGE)], []),
        "values, too many for a mod",
    ),
    "list of lists": (
        file_of([key("a", 9, struct.pack("<IQ", 9, 1))], []),
        "or nested lists",
    ),
    "type of value": (file_of([key("a", 77, b"")], []), "values of type 77, or"),
    "twice": (file_of([key("a", 7, b"\x00")] * 2, []), "'a' occurs twice"),
    "not UTF-8": (
        file_of([key("a", 8, struct.pack("<Q", 1) + b"\xff")], []),
        "xff' in a string is",
    ),
    "lines in a name": (file_of([key("a\nb", 7, b"\x00")], []), "is not a printable name"),
    "axes": (file_of([], [tensor("t", (1,) * 9, 0, 0)]), "a tensor has 9 axes, not 1 to 4"),
    "quantised": (file_of([], [tensor("t", (256,), 15, 0)]), "tensor 't' is Q8_K, which is not s"),
    "of no type": (file_of([], [tensor("t", (256,), 99, 0)]), "tensor 't' is type 99, which is"),
    "half a block": (
        file_of([], [tensor("t", (2, 31), 8, 0)]),
        r"has invalid shape \(2, 31\) or offset 0",
    ),
    "beyond the end": (file_of([], [tensor("t", (9,), 0, 0)], bytes(8)), "truncated: tensor 't'"),
    "huge": (file_of([], [tensor("t", (1 << 40, 1 << 40), 0, 0)]), "truncated: tensor 't'"),
    "overlapping": (
        file_of([], [tensor("t", (9,), 0, 0), tensor("u", (9,), 0, 32)], bytes(99)),
        "tensor 'u' has invalid shape .* or offset 32",
    ),
    "not aligned": (
        file_of([], [tensor("t", (1,), 0, 4)], bytes(99)),
        "has invalid shape .* or offset 4",
    ),
    "alignment": (
        file_of([key("general.alignment", 4, struct.pack("<I", 3))], []),
        "general.alignment=3 is not a power of two",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, words = REFUSED[name]
    with pytest.raises(WorkhorseError, match=words) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert re.search(r"; (download|use|give) |: download it again$", str(caught.value))


def test_a_header_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 64)
    with pytest.raises(WorkhorseError, match="has a header that is too large for a model"):
        read(tmp_path, file_of([key("a", 8, text("x" * 100))], []))
