"""Weights in 8 or 4 bits: their codes, and linear layers that multiply by them.

Each row of a weight is split into groups of 32 elements. A group has one scale in bfloat16, and
each element has a code, which stands for one of a few levels:

    ŵ = scale · level[code]

name   bits per element   levels
int8   8.5                -127 … 127
int4   4.5                16 unevenly spaced, denser where weights are frequent; see `_DENSE`

int8: the scale is the group's largest magnitude / 127, rounded to bfloat16. The error of an element
is `|w - ŵ| <= scale / 2`.

int4: several scales are tried for each group, and the one with the least squared error is used. The
error of an element is at most half the distance between adjacent levels times the scale, except for
rare elements beyond the last level.

On a CPU, a native operator multiplies by the codes (`native/ops/decoding/packed_linear.h`). Without
the operator, the weight is dequantised to the dtype of x at every call, which is slow. The results
differ only by rounding. The weight has no gradient. The gradient of x is computed
from one block of dequantised rows after another, so a whole weight is never dequantised for it.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workhorse.devices.memory import in_large_pages
from workhorse.devices.tape import recording
from workhorse.devices.transfer import Destination
from workhorse.errors import WorkhorseError
from workhorse.native import Decoding, resolve
from workhorse.native.decoding import GROUP, LANES
from workhorse.nn.experts.mixture import GroupedLinear, Groups, grouped_product
from workhorse.nn.facts import LinearFacts, multiplied_by_owner
from workhorse.nn.products import wide
from workhorse.transforms.record import check, record

FormatName = Literal["int8", "int4"]

_DENSE = (-96, -71, -55, -41, -30, -20, -11, -1, 8, 18, 29, 41, 54, 69, 88, 113)
"""The levels of int4, from Lloyd's algorithm on groups of normally distributed values, alternating
with the search for scales. On such values the relative squared error is 0.56 %. With evenly spaced
levels it is 0.66 %, and 0.74 % if the scale follows from the largest value without a search."""
OFFSET = 128
"""Offset added to levels to store them as uint8."""
BLOCK = 2**20
"""Number of elements of a weight that are dequantised at a time for gradients and norms."""
_CHUNK = 2**18
"""Number of elements quantised at a time: few enough to stay in the CPU's cache."""


class Format(NamedTuple):
    """A quantisation format: the levels of its codes, and how the scales are found."""

    per_byte: int
    """Number of codes per byte."""
    levels: tuple[int, ...]
    """The level of each code."""
    starts: tuple[float, ...]
    """Each value gives one scale to try for a group: the scale that maps the group's element of
    largest magnitude to this level."""
    refine: bool
    """True to replace each tried scale by the least-squares scale for the codes that it gives."""


FORMATS: dict[FormatName, Format] = {
    "int8": Format(1, tuple(range(-128, 128)), (127.0,), refine=False),
    "int4": Format(2, _DENSE, (124.0, 113.0, -102.0), refine=True),
}


def shape_of_codes(out_features: int, in_features: int, format: Format) -> tuple[int, int, int]:
    """Shape of a weight's codes: (blocks of 16 rows, groups of 32 columns, bytes per group)."""
    blocks, groups = math.ceil(out_features / LANES), math.ceil(in_features / GROUP)
    return blocks, groups, LANES * GROUP // format.per_byte


def encode(weight: Tensor, codes: Tensor, scales: Tensor, format: Format) -> None:
    """Quantise a weight.

    Args:
        weight: (out_features, in_features), of any floating-point dtype.
        codes: output, uint8, with the shape from `shape_of_codes`.
        scales: output, (blocks, groups, 16), bfloat16 values stored as int16.
        format: the format of the codes.
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
    """A table with the level plus `OFFSET` of each code, uint8 (number of codes,).

    None for int8, which needs no table: its codes are equal to their levels plus `OFFSET`.
    """
    if format.per_byte == 1:
        return None
    levels = torch.tensor(format.levels, dtype=torch.int16, device=device)
    return (levels + OFFSET).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, table: Tensor | None) -> Tensor:
    """Dequantise a weight to float32, padded to whole blocks of 16 rows and groups of 32 columns.

    Args:
        codes: uint8, with the shape from `shape_of_codes`.
        scales: (blocks, groups, 16), bfloat16 values stored as int16.
        table: result of `level_table` for the format, passed in because a compiled program needs it
            as an input.
    """
    level = _unpack(codes, 1) if table is None else table[_unpack(codes, 2).int()]
    scale = scales.view(torch.bfloat16).transpose(1, 2).unsqueeze(-1).float()
    return ((level.float() - OFFSET) * scale).flatten(2).flatten(0, 1)


def _quantize(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantise groups of elements.

    Args:
        weight: float32, (…, 32).
        format: the format of the codes.

    Returns:
        Codes, uint8 (…, 32), and scales, bfloat16 (…).
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
    """Two tables for `_look_up`: the level nearest to a value, and the code of that level.

    Each entry covers an interval of width 1/2. The tables are exact, because values halfway between
    two integer levels are multiples of 1/2.
    """
    middles = torch.arange(512).float() / 2 - 127.75
    levels = torch.tensor(format.levels, dtype=torch.float32)
    codes = (middles[:, None] - levels).abs().argmin(-1)
    return levels[codes], codes.to(torch.uint8)


def _look_up(table: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Look up `weight / scale` in a table with 512 entries, from -128 in steps of 1/2."""
    per_unit = torch.where(scale == 0, 1, scale).reciprocal() * 2
    index = torch.addcmul(torch.tensor(256.0, device=weight.device), weight, per_unit)
    return table.index_select(0, index.int().clamp_(0, 511).flatten()).view_as(weight)


def _pack(codes: Tensor, per_byte: int) -> Tensor:
    """Pack codes (blocks, 16, groups, 32) to (blocks, groups, bytes), as in `packed_linear.h`."""
    blocks, _, groups, _ = codes.shape
    if per_byte > 1:
        low, high = codes.view(blocks, LANES, groups, -1, 2, 4).unbind(-2)
        codes = low | high << 4
    return codes.reshape(blocks, LANES, groups, -1, 4).permute(0, 2, 3, 1, 4).flatten(2)


def _unpack(packed: Tensor, per_byte: int) -> Tensor:
    """Unpack codes (blocks, groups, bytes) to (blocks, 16, groups, 32): the inverse of `_pack`."""
    blocks, groups, _ = packed.shape
    codes = packed.view(blocks, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4)
    if per_byte > 1:
        shifts = torch.arange(per_byte, dtype=torch.uint8, device=packed.device)[:, None] * 4
        codes = codes.unsqueeze(-2) >> shifts & 15
    return codes.reshape(blocks, LANES, groups, GROUP)


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Split a matrix into blocks of rows of up to `BLOCK` elements, in whole blocks of codes."""
    at_a_time = max(1, BLOCK // (width * LANES)) * LANES
    return (slice(first, min(first + at_a_time, rows)) for first in range(0, rows, at_a_time))


class QuantizedWeight(nn.Module):
    """A weight matrix, or a stack of matrices, stored as codes and scales.

    Args:
        shape: (out_features, in_features), or (matrices, out_features, in_features).
        format: the format of the codes.
        bias: the bias, shared with the original layer.
        device: the device of the codes. They are uninitialised until `copy_` is called.
        decoding: native operators that multiply by codes; None to dequantise the weight first.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor | None

    def __init__(
        self,
        shape: torch.Size,
        format: FormatName,
        bias: nn.Parameter | None = None,
        device: torch.device | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        *matrices, self.out_features, self.in_features = shape
        self.format: FormatName = format
        blocks, groups, size = shape_of_codes(self.out_features, self.in_features, FORMATS[format])
        codes = torch.empty(*matrices, blocks, groups, size, dtype=torch.uint8, device=device)
        # The bits of bfloat16 as integers, so that casting the model does not change them.
        scales = torch.empty(*matrices, blocks, groups, LANES, dtype=torch.int16, device=device)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("table", level_table(FORMATS[format], device), persistent=False)
        self.bias = bias
        self.decoding = decoding

    @classmethod
    def of(
        cls,
        layer: nn.Linear | GroupedLinear,
        format: FormatName,
        decoding: Decoding | None = None,
    ) -> Self:
        """Create a quantised copy of a layer."""
        made = cls(layer.weight.shape, format, layer.bias, layer.weight.device, decoding)
        return made.copy_(layer.weight.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def linear_facts(self) -> LinearFacts:
        return LinearFacts(self.shape, self.nbytes)

    def copy_(self, weight: Tensor) -> Self:
        """Quantise a weight and store its codes and scales here, in place."""
        matrices = weight.view(-1, self.out_features, self.in_features)
        for matrix, codes, scales in zip(matrices, *self._stacks(), strict=True):
            encode(matrix, codes, scales, FORMATS[self.format])
        return self

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight, in its original shape."""
        made = [
            decode(codes, scales, self.table)[: self.out_features, : self.in_features]
            for codes, scales in zip(*self._stacks(), strict=True)
        ]
        return torch.stack(made).to(dtype).view(self.shape)

    def in_blocks(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield the dequantised weight in blocks of rows: index of the matrix, rows, and values.

        The index is 0 for a single matrix. Values are float32, (rows, in_features).
        """
        for index in range(len(self._stacks()[0])):
            for rows, values in self.matrix_in_blocks(index):
                yield index, rows, values

    def matrix_in_blocks(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield one dequantised matrix in blocks of rows: the rows, and their values in float32."""
        codes, scales = (stack[index] for stack in self._stacks())
        blocks = [*row_blocks(self.out_features, self.in_features)]
        if recording():  # the blocks between allocate the same memory as the second
            blocks = [*blocks[:2], *blocks[2:][-1:]]
        for rows in blocks:
            here = slice(rows.start // LANES, math.ceil(rows.stop / LANES))
            values = decode(codes[here], scales[here], self.table)
            yield rows, values[: rows.stop - rows.start, : self.in_features]

    def input_gradient(self, above: Tensor, ends: Tensor | None = None) -> Tensor:
        """The gradient `above Ŵ` of the input x, in the dtype of `above`.

        A native operator that multiplies by the codes can replace this function.

        Args:
            above: gradient of the output without bias, (…, out_features).
            ends: for a stack of matrices, the end of each matrix's rows; see `Groups`.
        """
        rows = above.reshape(-1, self.out_features)
        dtype = wide(above.dtype)
        total = torch.zeros(len(rows), self.in_features, dtype=dtype, device=above.device)
        bounds = [0, len(rows)] if ends is None else [0, *cast(list[int], ends.tolist())]
        for index, (first, last) in enumerate(itertools.pairwise(bounds)):
            for columns, weight in self.matrix_in_blocks(index) if last > first else ():
                part = rows[first:last, columns] @ weight.to(above.dtype)
                total[first:last] += part
        return total.to(above.dtype).view(*above.shape[:-1], self.in_features)

    def product(self, x: Tensor, bias: Tensor | None, ends: Tensor | None = None) -> Tensor:
        """`x Ŵᵀ + bias`, or `x[r] Ŵ[g]ᵀ` for the matrix g of each row r, with the gradient of x.

        Args:
            x: (…, in_features).
            bias: (out_features); only for a single matrix.
            ends: for a stack of matrices, the end of each matrix's rows; see `Groups`.
        """
        inputs = (x,) if bias is None else (x, bias)
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            return _Product.apply(x, bias, self, ends)
        known = x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu"
        if known and self.decoding is not None:
            x = F.pad(x, (0, -self.in_features % GROUP)) if self.in_features % GROUP else x
            packed = (self.codes, self.scales, self.table)
            return self.decoding.packed_linear(
                x, *packed, bias, out_features=self.out_features, ends=ends
            )
        weight = self.dequantized(x.dtype)
        return F.linear(x, weight, bias) if ends is None else grouped_product(x, weight, ends)

    def _stacks(self) -> tuple[Tensor, Tensor]:
        """The codes and scales with a leading axis for the matrices, of size 1 for one matrix."""
        codes, scales = self.codes, self.scales
        return codes.view(-1, *codes.shape[-3:]), scales.view(-1, *scales.shape[-3:])

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.shape))}, {self.format}"


class QuantizedLinear(QuantizedWeight):
    """A linear layer `x Wᵀ + b` with a quantised weight W."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedGroupedLinear(QuantizedWeight):
    """A quantised `GroupedLinear`: `x[r] @ W[g]ᵀ + b[g]`, where row r of x is in group g."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        y = self.product(x, None, groups.ends)
        return y if self.bias is None else y + self.bias[groups.of_row]


QUANTIZED: dict[type[nn.Module], type[QuantizedWeight]] = {
    nn.Linear: QuantizedLinear,
    GroupedLinear: QuantizedGroupedLinear,
}
"""For each class of layers that can be quantised, the quantised class."""


class _Product(torch.autograd.Function):
    """`QuantizedWeight.product` with gradients of x and the bias. It saves no tensor but `ends`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedWeight, ends: Tensor | None
    ) -> Tensor:
        ctx.layer, ctx.ends = layer, ends
        return layer.product(x, bias, ends)  # autograd is off here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_bias, *_ = ctx.needs_input_grad
        dx = ctx.layer.input_gradient(above[0], ctx.ends) if for_x else None
        return dx, above[0].flatten(0, -2).sum(dim=0) if for_bias else None, None, None


def quantize(model: nn.Module, format: FormatName) -> nn.Module:
    """Quantise the weights of a model's linear layers, in place; see `place_codes`."""
    weights = dict(model.named_parameters())
    for name, place in place_codes(model, format).items():
        weight = weights.pop(name)  # so that its memory is freed after its turn
        if not isinstance(place, Tensor):
            place.copy_(weight.detach())
    return model


@torch.no_grad()
def place_codes(
    model: nn.Module, format: FormatName, *, inside: str = ""
) -> dict[str, Destination]:
    """Replace a model's linear layers by quantised layers with uninitialised codes.

    The caller then copies each weight to its destination, which quantises it.

    Embeddings, norms and routers are not quantised, nor are layers with less than 16 outputs or 32
    inputs, nor layers with a weight that latent attention multiplies itself. A head that is tied to
    the embedding gets its own quantised copy, so the embedding stays exact. Experts are quantised
    only if a native operator can multiply by their codes; otherwise all experts would be
    dequantised at every call.

    Args:
        model: the model, on its device. Its state dict contains codes and scales afterwards.
        format: `int8` or `int4`.
        inside: beginning of the names of the layers to quantise, such as `layers.`.

    Returns:
        The destination of each weight, by the name that the weight had before.

    Raises:
        WorkhorseError: the format is unknown, no layer can be quantised, or the model is already
            quantised or prepared for execution.
    """
    if format not in FORMATS:
        raise WorkhorseError(f"quantize={format} is not a format; choose {' or '.join(FORMATS)}")
    check(model, "quantize")
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    packed: dict[str, list[Destination]] = defaultdict(list)
    made: list[QuantizedWeight] = []
    # Wait for the operators: without them this process would dequantise each weight at every call.
    on_cpu = any(weight.device.type == "cpu" for weight in model.parameters())
    decoding = resolve("decoding", wait=True).decoding if on_cpu else None
    for name, layer, kind in _layers(model, decoding):
        if not name.startswith(inside):
            continue
        quantized = kind(layer.weight.shape, format, layer.bias, layer.weight.device, decoding)
        model.set_submodule(name, quantized)
        packed[names[layer.weight]].append(quantized)
        made.append(quantized)
    if not made:
        raise WorkhorseError(f"quantize={format} finds no linear layer to quantise; omit quantize")
    _into_large_pages(made)
    record(model, "quantize", format=format)
    kept = {name: [weight.detach()] for name, weight in model.named_parameters()}
    places = {name: [*kept.get(name, ()), *packed[name]] for name in names.values()}
    return {name: one[0] if len(one) == 1 else _Everywhere(one) for name, one in places.items()}


@dataclass(frozen=True)
class _Everywhere:
    """Destination that copies a weight to several modules, such as embedding and tied head."""

    places: Sequence[Destination]

    @property
    def shape(self) -> torch.Size:
        return self.places[0].shape

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)

    def copy_(self, weight: Tensor) -> None:
        for place in self.places:
            place.copy_(weight)


def _layers(
    model: nn.Module, decoding: Decoding | None
) -> list[tuple[str, nn.Linear | GroupedLinear, type[QuantizedWeight]]]:
    """The layers to quantise, by name, and the classes of their replacements."""
    kept = multiplied_by_owner(model)
    found: list[tuple[str, nn.Linear | GroupedLinear, type[QuantizedWeight]]] = []
    for name, part in model.named_modules():
        kind = QUANTIZED.get(type(part))
        if kind is None or part in kept or (kind is QuantizedGroupedLinear and decoding is None):
            continue
        layer = cast(nn.Linear | GroupedLinear, part)
        if _large_enough(layer.weight):
            found.append((name, layer, kind))
    return found


def _large_enough(weight: Tensor) -> bool:
    return weight.shape[-2] >= LANES and weight.shape[-1] >= GROUP


def _into_large_pages(layers: Sequence[QuantizedWeight]) -> None:
    """Move codes and scales into contiguous large pages, for speed: each token reads them all."""
    here = [layer for layer in layers if layer.codes.device.type == "cpu"]
    for name, dtype in (("codes", torch.uint8), ("scales", torch.int16)):
        shapes = [layer.get_buffer(name).shape for layer in here]
        for layer, room in zip(here, in_large_pages(shapes, dtype), strict=True):
            setattr(layer, name, room)
