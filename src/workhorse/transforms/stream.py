"""Linear layers that read their weights at the speed of memory for a few rows.

Decoding computes one row per text, so a layer takes as long as reading its weights; PyTorch's
`linear` reaches a half to two thirds of the memory's bandwidth. The many rows of a prompt are a
gemm, for which the matrix unit of some CPUs has its own operator in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workhorse.native import Decoding, MatrixUnit, Operators
from workhorse.transforms.record import check, record
from workhorse.transforms.replace import become, replace_modules

FEW_ROWS = {torch.bfloat16: 128, torch.float32: 16}
"""The most rows for which `Decoding.linear` beat PyTorch's `linear`, by dtype of the weights."""
ONE_PASS = 64
"""The same against the matrix unit, for bfloat16; up to 128 rows the two were equally fast."""


class StreamedLinear(nn.Linear):
    """`nn.Linear` by a native operator, for a few rows and without gradients."""

    decoding: Decoding
    matrix_unit: MatrixUnit | None
    """For many rows."""
    few_rows: int

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        same = input.dtype == self.weight.dtype
        if torch.is_grad_enabled() or not same:
            return F.linear(input, self.weight, self.bias)
        if rows <= self.few_rows:
            return self.decoding.linear(input, self.weight, self.bias)
        multiply = F.linear if self.matrix_unit is None else self.matrix_unit.linear
        return multiply(input, self.weight, self.bias)


def stream_weights(model: nn.Module, operators: Operators) -> None:
    """Let a model's `nn.Linear` on the CPU read their weights at the speed of memory.

    In place; parameters keep their names, values, sharing and memory.

    Sums are in float32 but in another order than PyTorch's, so results differ by rounding. Apply
    this after transforms that replace or join linear layers, and after moving or casting the model.

    Args:
        model: to change.
        operators: of decoding, without which nothing is replaced, and of the matrix unit.

    Raises:
        WorkhorseError: the model carries a transform that this cannot follow.
    """
    check(model, "stream_weights")
    decoding = operators.decoding
    if decoding is None:
        return

    def choose(module: nn.Module) -> nn.Module:
        if type(module) is not nn.Linear or not _streams(module):
            return module
        dtype = module.weight.dtype
        unit = operators.matrix_unit if dtype == torch.bfloat16 else None
        few_rows = FEW_ROWS[dtype] if unit is None else ONE_PASS
        return become(
            module, StreamedLinear, decoding=decoding, matrix_unit=unit, few_rows=few_rows
        )

    replace_modules(model, choose)
    record(model, "stream_weights", operators=operators)


def _streams(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.device.type == "cpu" and weight.dtype in FEW_ROWS and weight.is_contiguous()
