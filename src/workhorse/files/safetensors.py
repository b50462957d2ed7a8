"""Safetensors files: reading headers, and writing parts of tensors.

A file is the length of the header in 8 bytes, the header, and the tensors' bytes. The header is
JSON:

    {"__metadata__": {"format": "pt"},
     "NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}

Offsets are relative to the header's end. The tensors' bytes fill the rest of the file without gap
or overlap. Format: huggingface/safetensors.

Each process can write its own slices of the tensors in place, and the file is the same as if one
process had written it.
"""

import itertools
import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import collector_paused, parse_json, unreadable

MAX_HEADER_BYTES = 32_000_000
"""Maximum size of a header in bytes. `parse_json` allows about 100,000 tensors."""
MAX_NAME = 512
MAX_RANK = 16
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in a safetensors file. Its bytes are at positions `begin` to `end - 1`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BinaryIO, path: Path) -> dict[str, Stored]:
    """Return the tensors in a file's header, sorted by position.

    Args:
        file: the file, opened unbuffered for reading, at its start.
        path: the file's name in error messages.

    Raises:
        WorkhorseError: the file is incomplete, or its header is invalid.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_read(file, _LENGTH_BYTES, path), "little")
    data = _LENGTH_BYTES + length
    if data > size:
        raise WorkhorseError(
            f"{path} has {size} bytes, fewer than its header of {length}; download it again"
        )
    if length > MAX_HEADER_BYTES:
        raise WorkhorseError(
            f"{path} has a header of {length} bytes, larger than the limit of {MAX_HEADER_BYTES}; "
            "download it again"
        )
    raw = _read(file, length, path)
    with collector_paused():
        tensors = _parse(raw, path, data)
        return _without_gaps(tensors, data, size, path)


def _parse(raw: bytes, path: Path, data: int) -> dict[str, Stored]:
    """Return the tensors in a header; `data` is the position in the file where the header ends."""
    header = parse_json(raw, f"the header of {path}")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WorkhorseError(f"{path}: {_METADATA} is {shown(metadata)}, not a mapping of strings")
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _entry(name, entry, data)
        except ValueError as error:
            raise WorkhorseError(f"{path}: tensor {shown(name)} {error}") from None
    return tensors


def _read(file: BinaryIO, count: int, path: Path) -> bytes:
    try:
        raw = file.read(count) or b""
    except OSError as error:
        raise unreadable(path, error) from None
    if len(raw) < count:
        raise WorkhorseError(f"{path} ends within its header; download it again")
    return raw


def _entry(name: str, entry: Any, data: int) -> Stored:
    """Convert the header's description of a tensor.

    Raises:
        ValueError: the description is invalid; the message continues `tensor NAME`.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError("has an invalid name; download the file again")
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise ValueError(
            f"is {shown(entry)}, not a dtype, a shape and data_offsets; download the file again"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has unknown dtype {shown(dtype)}; known: {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"has invalid shape {shown(shape)}; download the file again")
    if not _are_counts(offsets) or len(offsets) != len(("begin", "end")):
        raise ValueError(
            f"has data_offsets {shown(offsets)}, not a begin and an end; download the file again"
        )
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(
            f"of {dtype} and shape {shown(shape)} needs {shown(needed)} bytes, but its "
            f"data_offsets span {shown(end - begin)}; download the file again"
        )
    return Stored(DTYPES[dtype], tuple(shape), data + begin, data + end)


def _are_counts(values: Any) -> bool:
    """Return True for a list of integers from 0 to 2^63 - 1, the largest size in PyTorch."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:  # excludes bool
        return False
    return min(values, default=0) >= 0 and max(values, default=0) < 1 << 63


def _without_gaps(
    tensors: Mapping[str, Stored], data: int, size: int, path: Path
) -> dict[str, Stored]:
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = data
    for name, stored in ordered.items():
        if stored.begin != at:
            problem = "overlaps the previous one" if stored.begin < at else "follows unused bytes"
            raise WorkhorseError(f"{path}: tensor {shown(name)} {problem}; download the file again")
        at = stored.end
    if at != size:
        problem = "is truncated" if at > size else "has extra bytes after the last tensor"
        raise WorkhorseError(f"{path} {problem}: {size} bytes, not {at}; download it again")
    return ordered


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the beginning of a file with these tensors, in this order: header size and header.

    Raises:
        KeyError: the format does not support a dtype.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}  # required by transformers
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = entry
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw


class Slice(NamedTuple):
    """A part of a tensor: a range of indices along each axis. It may be empty."""

    values: Tensor
    starts: tuple[int, ...]
    """The start index along each axis."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


Slices = Mapping[str, Slice]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Slice]:
    """Return, for each tensor, a slice that contains the whole tensor."""
    return {
        name: Slice(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def lay_out(path: Path, slices: Slices) -> None:
    """Create a file of full size for the whole tensors, but write only the header.

    `fill` writes the tensors' bytes. An existing file is replaced.
    """
    path.unlink(missing_ok=True)  # a link is not followed
    with path.open("xb") as file:
        header = _header(slices)
        file.write(header)
        file.truncate(len(header) + sum(map(_bytes, slices.values())))


def fill(path: Path, slices: Slices) -> None:
    """Write slices at their positions into a file that `lay_out` made for the same tensors."""
    with path.open("r+b", buffering=0) as file:
        at = len(_header(slices))
        for _, one in _ordered(slices):
            for first, run in _runs(one):
                _write(file.fileno(), run, at + first * one.values.itemsize)
            at += _bytes(one)


def _runs(one: Slice) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first element in the whole tensor, values) of each contiguous range."""
    if not one.values.numel():
        return
    values = one.values.cpu().contiguous()
    partial = [axis for axis, size in enumerate(values.shape) if size != one.shape[axis]]
    outer = values.shape[: partial[-1]] if partial else ()
    steps = [math.prod(one.shape[axis + 1 :]) for axis in range(values.ndim)]
    begin = sum(start * step for start, step in zip(one.starts, steps, strict=True))
    for place, run in zip(
        itertools.product(*map(range, outer)), values.reshape(math.prod(outer), -1), strict=True
    ):
        yield begin + sum(map(operator.mul, place, steps)), run


def _write(file: int, values: Tensor, at: int) -> None:
    data = values.view(torch.uint8).numpy().data
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


def _ordered(slices: Slices) -> list[tuple[str, Slice]]:
    """Sort tensors by descending element size, so that all are aligned; then by name."""
    return sorted(slices.items(), key=lambda item: (-item[1].values.itemsize, item[0]))


def _header(slices: Slices) -> bytes:
    return header_bytes((name, one.values.dtype, one.shape) for name, one in _ordered(slices))


def _bytes(one: Slice) -> int:
    """Return the size in bytes of the whole tensor that a slice belongs to."""
    return math.prod(one.shape) * one.values.itemsize
