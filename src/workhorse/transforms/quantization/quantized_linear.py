"""Linear layers with weights of 8 or 4 bits: decoding reads a half or a quarter of the memory.

On a CPU a native operator multiplies by the codes (`native/ops/decoding/packed_linear.h`). Without
it the weight is dequantised to the dtype of x at every call, which is correct but slow. The two
differ by rounding. The weight has no gradient.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.native import Decoding
from workhorse.native.decoding import GROUP, LANES
from workhorse.nn.experts.grouped_linear import GroupedLinear, Groups, grouped_product
from workhorse.transforms.quantization.codes import (
    FORMATS,
    FormatName,
    decode,
    encode,
    level_table,
    shape_of_codes,
)


class QuantizedWeight(nn.Module):
    """A matrix in codes and scales, or a stack of them.

    Args:
        shape: (out_features, in_features), or (matrices, out_features, in_features).
        format: of the codes.
        bias: shared with the original layer.
        device: of the codes, which are empty until `copy_`.
        decoding: the native operators; None to dequantise the weight.
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
        """A layer with its weight quantised."""
        made = cls(layer.weight.shape, format, layer.bias, layer.weight.device, decoding)
        return made.copy_(layer.weight.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def copy_(self, weight: Tensor) -> Self:
        """Quantise a weight into the codes; the counterpart of `Tensor.copy_`."""
        matrices = weight.view(-1, self.out_features, self.in_features)
        for matrix, codes, scales in zip(matrices, *self._stacks(), strict=True):
            encode(matrix, codes, scales, FORMATS[self.format])
        return self

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight that the codes stand for, in its shape."""
        made = [
            decode(codes, scales, self.table)[: self.out_features, : self.in_features]
            for codes, scales in zip(*self._stacks(), strict=True)
        ]
        return torch.stack(made).to(dtype).view(self.shape)

    def _operators_for(self, x: Tensor) -> Decoding | None:
        """The native operators, if they accept x."""
        known = x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu"
        return self.decoding if known and not torch.is_grad_enabled() else None

    def _product(
        self, by: Decoding, x: Tensor, bias: Tensor | None, ends: Tensor | None = None
    ) -> Tensor:
        x = F.pad(x, (0, -self.in_features % GROUP)) if self.in_features % GROUP else x
        packed = (self.codes, self.scales, self.table)
        return by.packed_linear(x, *packed, bias, out_features=self.out_features, ends=ends)

    def _stacks(self) -> tuple[Tensor, Tensor]:
        """The codes and scales of every matrix; a single matrix is a stack of one."""
        codes, scales = self.codes, self.scales
        return codes.view(-1, *codes.shape[-3:]), scales.view(-1, *scales.shape[-3:])

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.shape))}, {self.format}"


class QuantizedLinear(QuantizedWeight):
    """`x Wᵀ + b`."""

    def forward(self, x: Tensor) -> Tensor:
        if by := self._operators_for(x):
            return self._product(by, x, self.bias)
        return F.linear(x, self.dequantized(x.dtype), self.bias)


class QuantizedGroupedLinear(QuantizedWeight):
    """`x[r] @ W[g]ᵀ + b[g]` for the group g of each row r, as `GroupedLinear`."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        if by := self._operators_for(x):
            y = self._product(by, x, None, groups.ends)
        else:
            y = grouped_product(x, self.dequantized(x.dtype), groups.ends)
        return y if self.bias is None else y + self.bias[groups.of_row]
