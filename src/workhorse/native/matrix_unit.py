"""Gemms of bfloat16 or float32 matrices on a CPU with a matrix unit; see `ops/gemm/tiles.h`.

They are compiled separately from the other operators, which run on any CPU.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.devices.instructions import cpu_has
from workhorse.native import build

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`a b + bias` of two matrices."""


@dataclass(frozen=True)
class MatrixUnit:
    """Gemms on the unit; an instance exists only if it may be used."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def gemm(
        self,
        a: Float[Tensor, "rows inner"],
        b: Float[Tensor, "inner columns"],
        bias: Float[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, "rows columns"]:
        """`a b + bias`, summed in float32. It computes no gradients.

        A float32 number is multiplied as the sum of two bfloat16 numbers, which PyTorch calls
        "high" precision of float32 products. A result is off by at most 2⁻¹⁵ of `|a| |b|`, besides
        the rounding of float32 sums; with random numbers, 1,536 in a sum, by 2⁻²⁰.

        Args:
            a: bfloat16 or float32 on the CPU, with rows or columns contiguous; transposed views are
                as fast.
            b: likewise.
            bias: for each column, likewise.
        """
        return torch.ops.workhorse.gemm.default(a, b, bias)

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """`x Wᵀ + bias`, for any order of x in memory; see `gemm`."""
        return linear(self.gemm, x, weight, bias)


def linear(gemm: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x Wᵀ + bias` by a gemm, for any order of x in memory."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], len(weight))


def rows(x: Tensor) -> Tensor:
    """A tensor as a matrix, its last axis as rows, contiguous."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def load(*, wait: bool) -> MatrixUnit:
    """The operator, compiled first if it never was on this machine; see `decoding.load`.

    Raises:
        build.Unavailable: why it cannot be called, in one line.
    """
    if not cpu_has("amx_bf16"):
        raise build.Unavailable("the CPU has no matrix unit for bfloat16")
    return _load(build.ensure("matrix_unit", wait=wait))


@functools.cache
def _load(library: Path) -> MatrixUnit:
    build.load(library)
    if not hasattr(torch.ops.workhorse, "gemm"):  # the library found that it may not
        raise build.Unavailable("the operating system denies this process the matrix unit")
    torch.library.register_fake("workhorse::gemm", result_shape)
    return MatrixUnit()


def result_shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Of a gemm, for tracing."""
    del bias
    return a.new_empty((a.shape[0], b.shape[1]))
