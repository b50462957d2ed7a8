"""Weights as codes of 8 or 4 bits, in the order that `native/ops/decoding/packed_linear.h` reads.

Each row of a weight is split into groups of 32 numbers. A group has one scale in bfloat16, and each
number has a code, which stands for one of a few levels:

    ŵ = scale · level[code]

name   bits a number   levels
int8   8.5             -127 … 127
int4   4.5             16 unevenly spaced, dense where weights are; see `_DENSE`

In int8 `|w - ŵ| <= scale / 2`, where the scale is the group's largest magnitude / 127, rounded to
bfloat16. In int4 the scale is the candidate with the least squared error; a number's error is at
most half the distance of two levels times the scale, except for rare ones beyond the last level.
"""

import functools
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.native.decoding import GROUP, LANES

FormatName = Literal["int8", "int4"]

_DENSE = (-96, -71, -55, -41, -30, -20, -11, -1, 8, 18, 29, 41, 54, 69, 88, 113)
"""Levels of 4 bits, from Lloyd's algorithm on groups of normally distributed numbers, alternating
with the search for their scales. On these the squared error is 0.56 % of the squares; with evenly
spaced levels and the same search 0.66 %, and 0.74 % with the scale of the largest number."""
OFFSET = 128
"""Added to levels so that they are uint8."""
_CHUNK = 2**18
"""Numbers quantised at a time: few enough to stay in the cache."""


class Format(NamedTuple):
    """How numbers become codes."""

    per_byte: int
    """Codes per byte."""
    levels: tuple[int, ...]
    """The level of each code."""
    starts: tuple[float, ...]
    """Levels for the number of largest magnitude: a scale is tried for each."""
    refine: bool
    """Whether each tried scale is replaced by the best one for its codes, by least squares."""


FORMATS: dict[FormatName, Format] = {
    "int8": Format(1, tuple(range(-128, 128)), (127.0,), refine=False),
    "int4": Format(2, _DENSE, (124.0, 113.0, -102.0), refine=True),
}


def shape_of_codes(out_features: int, in_features: int, format: Format) -> tuple[int, int, int]:
    """(blocks of 16 rows, groups, bytes)."""
    blocks, groups = math.ceil(out_features / LANES), math.ceil(in_features / GROUP)
    return blocks, groups, LANES * GROUP // format.per_byte


def encode(weight: Tensor, codes: Tensor, scales: Tensor, format: Format) -> None:
    """Quantise a weight.

    Args:
        weight: (out_features, in_features), of any floating-point dtype.
        codes: filled, uint8, `shape_of_codes`.
        scales: filled, (blocks, groups, 16), the bits of a bfloat16 as int16.
        format: of the codes.
    """
    blocks, groups, _ = codes.shape
    at_a_time = max(1, _CHUNK // (groups * GROUP * LANES))  # blocks
    for first in range(0, blocks, at_a_time):
        here = slice(first, min(first + at_a_time, blocks))
        rows = weight[here.start * LANES : here.stop * LANES].to(codes.device, torch.float32)
        below = (here.stop - here.start) * LANES - rows.shape[0]
        rows = F.pad(rows, (0, groups * GROUP - rows.shape[1], 0, below))
        code, scale = _quantize(rows.reshape(-1, LANES, groups, GROUP), format)
        codes[here] = _pack(code, format.per_byte)
        scales[here] = scale.view(torch.int16).transpose(1, 2)


def level_table(format: Format, device: torch.device | None = None) -> Tensor | None:
    """The level of each code plus `OFFSET`, (codes,) uint8; None where that is the code itself."""
    if format.per_byte == 1:
        return None
    levels = torch.tensor(format.levels, dtype=torch.int16, device=device)
    return (levels + OFFSET).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, table: Tensor | None) -> Tensor:
    """The weight in float32, padded to whole blocks and groups.

    Args:
        codes: uint8, `shape_of_codes`.
        scales: (blocks, groups, 16), the bits of a bfloat16 as int16.
        table: `level_table` of the format, an input of a compiled program.
    """
    level = _unpack(codes, 1) if table is None else table[_unpack(codes, 2).int()]
    scale = scales.view(torch.bfloat16).transpose(1, 2).unsqueeze(-1).float()
    return ((level.float() - OFFSET) * scale).flatten(2).flatten(0, 1)


def _quantize(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes and bfloat16 scales of groups of numbers.

    Args:
        weight: float32, (…, 32).
        format: of the codes.

    Returns:
        uint8, (…, 32), and (…).
    """
    values, codes = (table.to(weight.device) for table in _nearest_level(format))
    extreme = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
    weight = weight / torch.where(extreme == 0, 1, extreme)  # squares neither overflow nor vanish
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, math.inf)
    for start in format.starts:
        scale = torch.full_like(extreme, 1 / start)
        if format.refine:
            level = _look_up(values, weight, scale)
            scale = (weight * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)
        error = (weight - scale * _look_up(values, weight, scale)).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    stored = (best * extreme).bfloat16()
    exact = stored.float() / torch.where(extreme == 0, 1, extreme)
    return _look_up(codes, weight, exact), stored.squeeze(-1)


@functools.cache
def _nearest_level(format: Format) -> tuple[Tensor, Tensor]:
    """Tables of the nearest level and its code, for `_look_up`; exact, as levels are integers."""
    middles = torch.arange(512).float() / 2 - 127.75
    levels = torch.tensor(format.levels, dtype=torch.float32)
    codes = (middles[:, None] - levels).abs().argmin(-1)
    return levels[codes], codes.to(torch.uint8)


def _look_up(table: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The table's entry for each number, indexed by half units of its scale from -128 up."""
    per_unit = torch.where(scale == 0, 1, scale).reciprocal() * 2
    index = torch.addcmul(torch.tensor(256.0, device=weight.device), weight, per_unit)
    return table.index_select(0, index.int().clamp_(0, 511).flatten()).view_as(weight)


def _pack(codes: Tensor, per_byte: int) -> Tensor:
    """(blocks, 16, groups, 32) to (blocks, groups, bytes), in the order of `packed_linear.h`."""
    blocks, _, groups, _ = codes.shape
    if per_byte > 1:
        low, high = codes.view(blocks, LANES, groups, -1, 2, 4).unbind(-2)
        codes = low | high << 4
    return codes.reshape(blocks, LANES, groups, -1, 4).permute(0, 2, 3, 1, 4).flatten(2)


def _unpack(packed: Tensor, per_byte: int) -> Tensor:
    """The inverse of `_pack`."""
    blocks, groups, _ = packed.shape
    codes = packed.view(blocks, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4)
    if per_byte > 1:
        shifts = torch.arange(per_byte, dtype=torch.uint8, device=packed.device)[:, None] * 4
        codes = codes.unsqueeze(-2) >> shifts & 15
    return codes.reshape(blocks, LANES, groups, GROUP)
