"""Gemms of bfloat16 or float32 matrices on a CPU with a matrix unit; see `ops/gemm/tiles.h`.

On x86, the matrix unit is AMX. These operators are in a separate library, because others run on any
CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.devices.instructions import cpu_has
from workhorse.native import build

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A gemm function: returns `a b + bias` for matrices a and b."""


@dataclass(frozen=True)
class MatrixUnit:
    """Gemms on the matrix unit; an instance exists only if this process may use the unit."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def gemm(
        self,
        a: Float[Tensor, "rows inner"],
        b: Float[Tensor, "inner columns"],
        bias: Float[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, "rows columns"]:
        """Compute `a b + bias`, summed in float32, without gradients.

        Each float32 value is split into a sum of two bfloat16 values, as in PyTorch's "high"
        precision of float32 matmuls. The error of a result is at most 2⁻¹⁵ of `|a| |b|`, plus the
        rounding of float32 sums. For random matrices with an inner size of 1,536, it is 2⁻²⁰.

        Args:
            a: bfloat16 or float32 on the CPU, with rows or columns contiguous; transposed views are
                equally fast.
            b: dtype and layout as a.
            bias: an element for each column, of the same dtype.
        """
        return torch.ops.workhorse.gemm.default(a, b, bias)

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """Compute `x Wᵀ + bias` with `gemm`. x may have any strides."""
        return linear(self.gemm, x, weight, bias)


def linear(gemm: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x Wᵀ + bias` with the function `gemm`. x may have any strides."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], len(weight))


def rows(x: Tensor) -> Tensor:
    """Reshape (…, width) to a matrix (rows, width) with contiguous rows; copy only if needed."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def load(*, wait: bool) -> MatrixUnit:
    """Load the operators. They are compiled first if necessary; see `decoding.load`.

    Raises:
        build.Unavailable: they cannot be called; the message is the reason in one line.
    """
    if not cpu_has("amx_bf16"):
        raise build.Unavailable("the CPU has no matrix unit for bfloat16")
    build.provide("matrix_unit", {"gemm": result_shape}, wait=wait)
    if not hasattr(torch.ops.workhorse, "gemm"):  # the library registers it only with permission
        raise build.Unavailable("the operating system denies this process the matrix unit")
    return MatrixUnit()


def result_shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Shape of a gemm's result, for tracing."""
    del bias
    return a.new_empty((a.shape[0], b.shape[1]))
