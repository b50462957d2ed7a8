"""Linear layers with weights of 8 or 4 bits: decoding reads a half or a quarter of the memory.

Each row of a weight is cut into groups of 32 numbers. A group has one scale in bfloat16, and a
number a code that stands for one of a few levels:

    ŵ = scale · level[code]

name   bits a number   levels
int8   8.5             -127 … 127
int4   4.5             16 unevenly spaced, dense where weights are; see `_DENSE`

In int8 `|w - ŵ| <= scale / 2`, the scale being the group's largest magnitude / 127 to the bits of a
bfloat16. In int4 the scale is the one of several with the least squared error; a number's error is
at most half the distance of two levels times the scale, but for the rare one beyond the last level.
"""

import functools
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse import native
from workhorse.errors import WorkhorseError
from workhorse.native.operators import GROUP, LANES
from workhorse.native.pages import in_large_pages
from workhorse.nn.latent_attention import LatentAttention
from workhorse.transforms.stream import StreamedLinear

FormatName = Literal["int8", "int4"]

_DENSE = (-96, -71, -55, -41, -30, -20, -11, -1, 8, 18, 29, 41, 54, 69, 88, 113)
"""Levels of 4 bits: Lloyd's algorithm on groups of normally distributed numbers, in turns with the
search for their scales. There the squared error is 0.56 % of the squares; with evenly spaced levels
and the same search 0.66 %, and 0.74 % with the scale taken from the largest number."""
_CHUNK = 2**18
"""Numbers quantised at a time: few enough to stay in a cache."""


class _Format(NamedTuple):
    per_byte: int
    """Codes in a byte."""
    levels: tuple[int, ...]
    """By code."""
    starts: tuple[float, ...]
    """Where the number of largest magnitude may come to lie: a scale is tried for each."""
    refine: bool
    """Replace each by the scale of least squared error for the codes it gives."""


_FORMATS: dict[FormatName, _Format] = {
    "int8": _Format(1, tuple(range(-128, 128)), (127.0,), refine=False),
    "int4": _Format(2, _DENSE, (124.0, 113.0, -102.0), refine=True),
}


class QuantizedLinear(nn.Module):
    """`x Wᵀ + b` with W in codes and scales; computes no gradients for W.

    With bfloat16 on a CPU that has the instructions, the native operator reads the codes; else W is
    first written out in x's type, which is right and slow. The two differ by rounding.

    Args:
        in_features: width of x.
        out_features: width of the result.
        format: of the codes.
        bias: shared with the layer it stands for.
    """

    codes: Tensor
    scales: Tensor
    levels: Tensor
    table: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: FormatName,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format: FormatName = format
        per_byte, levels, _, _ = _FORMATS[format]
        blocks, groups = math.ceil(out_features / LANES), math.ceil(in_features / GROUP)
        self.register_buffer(
            "codes", torch.zeros(blocks, groups, LANES * GROUP // per_byte, dtype=torch.uint8)
        )
        # Bits of bfloat16 as integers, which a cast of the model leaves alone.
        self.register_buffer("scales", torch.zeros(blocks, groups, LANES, dtype=torch.int16))
        table = torch.tensor(levels, dtype=torch.int16)
        self.register_buffer("levels", table, persistent=False)
        short = (table + 128).to(torch.uint8) if per_byte > 1 else None
        self.register_buffer("table", short, persistent=False)
        self.bias = bias
        self.native = native.load() and native.packs()

    @classmethod
    def of(cls, linear: nn.Linear, format: FormatName) -> "QuantizedLinear":
        """The layer with its weights quantised."""
        layer = cls(linear.in_features, linear.out_features, format, linear.bias)
        layer.to(linear.weight.device)
        weight = linear.weight.detach()
        weight = F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % LANES))
        at_a_time = max(1, _CHUNK // LANES // weight.shape[1])  # blocks
        chunks = weight.view(-1, LANES, weight.shape[1] // GROUP, GROUP).split(at_a_time)
        for chunk, codes, scales in zip(
            chunks, layer.codes.split(at_a_time), layer.scales.split(at_a_time), strict=True
        ):
            code, scale = _quantize(chunk.float(), _FORMATS[format])
            codes.copy_(_pack(code, _FORMATS[format].per_byte))
            scales.copy_(scale.view(torch.int16).transpose(1, 2))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.is_grad_enabled() or x.dtype != torch.bfloat16 or x.device.type != "cpu"
        if plain or not self.native:
            return F.linear(x, self.dequantized(x.dtype), self.bias)
        x = F.pad(x, (0, -self.in_features % GROUP)) if self.in_features % GROUP else x
        return native.packed_linear(
            x, self.codes, self.scales, self.table, self.bias, out_features=self.out_features
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W as the codes say: (out_features, in_features)."""
        codes = _unpack(self.codes, _FORMATS[self.format].per_byte)
        scales = self.scales.view(torch.bfloat16).transpose(1, 2).unsqueeze(-1)
        weight = self.levels.float()[codes.int()] * scales.float()
        weight = weight.flatten(2).flatten(0, 1)[: self.out_features, : self.in_features]
        return weight.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}"


def quantize(model: nn.Module, format: FormatName) -> nn.Module:
    """Replace a model's linear layers by quantised ones, in place.

    Embeddings, norms, routers and experts of a mixture stay as they are, and so do layers narrower
    than a group, and those whose weight latent attention reads by itself. A head that is tied to
    the embedding gets a copy, so the embedding keeps its numbers.

    Args:
        model: on its device, after what joins linear layers; its state dict then holds codes.
        format: `int8` or `int4`.

    Raises:
        WorkhorseError: there is no such format, or no layer to quantise.
    """
    if format not in _FORMATS:
        raise WorkhorseError(f"quantize={format} is not a format; choose {' or '.join(_FORMATS)}")
    kept = {
        layer
        for part in model.modules()
        if isinstance(part, LatentAttention)
        for layer in (part.k_up_proj, part.v_up_proj)
    }
    quantized: list[QuantizedLinear] = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and _worth_it(layer) and layer not in kept:
            quantized.append(QuantizedLinear.of(layer, format))
            model.set_submodule(name, quantized[-1])
    if not quantized:
        raise WorkhorseError(f"quantize={format} finds no linear layer; leave it out")
    _move(quantized)
    return model


def _move(layers: list[QuantizedLinear]) -> None:
    """What is read for every token, into large pages."""
    for name in ("codes", "scales"):
        here = [layer.get_buffer(name) for layer in layers if layer.codes.device.type == "cpu"]
        rooms = in_large_pages([buffer.shape for buffer in here], here[0].dtype) if here else []
        for buffer, room in zip(here, rooms, strict=True):
            buffer.data = room.copy_(buffer)


def _worth_it(layer: nn.Linear) -> bool:
    plain = type(layer).forward in (nn.Linear.forward, StreamedLinear.forward)
    return plain and layer.out_features >= LANES and layer.in_features >= GROUP


def _quantize(weight: Tensor, format: _Format) -> tuple[Tensor, Tensor]:
    """Codes and bfloat16 scales of groups of numbers.

    Args:
        weight: float32, (…, 32).
        format: what to quantise to.

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
def _nearest_level(format: _Format) -> tuple[Tensor, Tensor]:
    """Level and code nearest to what `_look_up` numbers; exact, levels being whole numbers."""
    middles = torch.arange(512).float() / 2 - 127.75
    levels = torch.tensor(format.levels, dtype=torch.float32)
    codes = (middles[:, None] - levels).abs().argmin(-1)
    return levels[codes], codes.to(torch.uint8)


def _look_up(table: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What stands in a table for each number, by half units of its scale from -128 up."""
    per_unit = torch.where(scale == 0, 1, scale).reciprocal() * 2
    index = torch.addcmul(torch.tensor(256.0, device=weight.device), weight, per_unit)
    return table.index_select(0, index.int().clamp_(0, 511).flatten()).view_as(weight)


def _pack(codes: Tensor, per_byte: int) -> Tensor:
    """(blocks, 16, groups, 32) to (blocks, groups, bytes), in the order of `packed.h`."""
    blocks, _, groups, _ = codes.shape
    if per_byte > 1:
        low, high = codes.view(blocks, LANES, groups, -1, 2, 4).unbind(-2)
        codes = low | high << 4
    return codes.reshape(blocks, LANES, groups, -1, 4).permute(0, 2, 3, 1, 4).flatten(2)


def _unpack(packed: Tensor, per_byte: int) -> Tensor:
    """The way back."""
    blocks, groups, _ = packed.shape
    codes = packed.view(blocks, groups, -1, LANES, 4).permute(0, 3, 1, 2, 4)
    if per_byte > 1:
        codes = torch.stack([codes & 15, codes >> 4], -2)
    return codes.reshape(blocks, LANES, groups, GROUP)
