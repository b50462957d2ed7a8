"""Rows of tensors of which other processes hold the rest, written into one safetensors file.

The rows of a tensor lie one after the other in a file. So each process writes its own to their
places, and what comes out is the file that one process would have written.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.tensors.safetensors_header import header_bytes


class Slice(NamedTuple):
    """Consecutive rows of a tensor, which may be all or none."""

    rows: Tensor
    first: int
    """The number of the first."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


Slices = Mapping[str, Slice]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Slice]:
    """All rows of each tensor."""
    return {
        name: Slice(tensor.detach(), 0, tuple(tensor.shape)) for name, tensor in tensors.items()
    }


def lay_out(path: Path, slices: Slices) -> None:
    """Make the file of the whole tensors, without their bytes; one in its place is replaced."""
    path.unlink(missing_ok=True)  # a link is not followed
    with path.open("xb") as file:
        header = _header(slices)
        file.write(header)
        file.truncate(len(header) + sum(map(_bytes, slices.values())))


def fill(path: Path, slices: Slices) -> None:
    """Write the rows to their places in a file that was laid out for them."""
    with path.open("r+b", buffering=0) as file:
        for at, rows in _placed(slices):
            data = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], at + done)


def _placed(slices: Slices) -> Iterator[tuple[int, Tensor]]:
    """Where in the file each tensor's rows begin, and the rows."""
    at = len(_header(slices))
    for _, one in _ordered(slices):
        row = _bytes(one) // one.shape[0] if one.shape and one.shape[0] else 0
        yield at + one.first * row, one.rows
        at += _bytes(one)


def _ordered(slices: Slices) -> list[tuple[str, Slice]]:
    """The widest numbers first, so that all are aligned; then by name."""
    return sorted(slices.items(), key=lambda item: (-item[1].rows.dtype.itemsize, item[0]))


def _header(slices: Slices) -> bytes:
    return header_bytes((name, one.rows.dtype, one.shape) for name, one in _ordered(slices))


def _bytes(one: Slice) -> int:
    """Of the whole tensor."""
    return math.prod(one.shape) * one.rows.dtype.itemsize
