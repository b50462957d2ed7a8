"""Parts of tensors of which other processes hold the rest, written into one safetensors file.

The numbers of a tensor lie one after the other in a file. So each process writes its own to their
places, and what comes out is the file that one process would have written.
"""

import itertools
import math
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.files.safetensors_header import header_bytes


class Slice(NamedTuple):
    """A part of a tensor, consecutive along each of its axes; it may be all or nothing."""

    values: Tensor
    starts: tuple[int, ...]
    """Where it begins along each axis."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


Slices = Mapping[str, Slice]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Slice]:
    """All of each tensor."""
    return {
        name: Slice(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def lay_out(path: Path, slices: Slices) -> None:
    """Make the file of the whole tensors, without their bytes; one in its place is replaced."""
    path.unlink(missing_ok=True)  # a link is not followed
    with path.open("xb") as file:
        header = _header(slices)
        file.write(header)
        file.truncate(len(header) + sum(map(_bytes, slices.values())))


def fill(path: Path, slices: Slices) -> None:
    """Write the parts to their places in a file that was laid out for them."""
    with path.open("r+b", buffering=0) as file:
        at = len(_header(slices))
        for _, one in _ordered(slices):
            for first, run in _runs(one):
                _write(file.fileno(), run, at + first * one.values.itemsize)
            at += _bytes(one)


def _runs(one: Slice) -> Iterator[tuple[int, Tensor]]:
    """The pieces of a part that lie without gaps in the whole, and where in it each begins."""
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
    """The widest numbers first, so that all are aligned; then by name."""
    return sorted(slices.items(), key=lambda item: (-item[1].values.itemsize, item[0]))


def _header(slices: Slices) -> bytes:
    return header_bytes((name, one.values.dtype, one.shape) for name, one in _ordered(slices))


def _bytes(one: Slice) -> int:
    """Of the whole tensor."""
    return math.prod(one.shape) * one.values.itemsize
