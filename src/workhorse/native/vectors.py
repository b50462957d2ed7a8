"""Gemms of float32 in vectors of 64 bytes; see `ops/gemm_vectors.h`."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.instructions import cpu_has, is_intel
from workhorse.native import build
from workhorse.native.matrix_unit import linear, result_shape


@dataclass(frozen=True)
class Vectors:
    """The gemm; an instance exists only where it is quicker than PyTorch's."""

    def gemm(
        self,
        a: Float[Tensor, "rows inner"],
        b: Float[Tensor, "inner columns"],
        bias: Float[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, "rows columns"]:
        """`a b + bias`; how a number is rounded depends on the inner size alone. No gradients.

        Args:
            a: float32 on the CPU, with rows or columns contiguous.
            b: likewise.
            bias: for each column, likewise.
        """
        return torch.ops.workhorse.product.default(a, b, bias)

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """`x Wᵀ + bias`, for any order of x in memory; see `gemm`."""
        return linear(self.gemm, x, weight, bias)


def load(*, wait: bool) -> Vectors:
    """The operator, compiled first if it never was on this machine; see `decoding.load`.

    Raises:
        build.Unavailable: why it cannot be called, in one line.
    """
    if is_intel():
        raise build.Unavailable("on Intel's CPUs PyTorch's library has vectors of 64 bytes too")
    return load_anywhere(wait=wait)


def load_anywhere(*, wait: bool) -> Vectors:
    """The same also where PyTorch's is as quick."""
    if not cpu_has("avx512_f"):
        raise build.Unavailable("the CPU has no vectors of 64 bytes")
    return _load(build.ensure("products", wait=wait))


@functools.cache
def _load(library: Path) -> Vectors:
    build.load(library)
    torch.library.register_fake("workhorse::product", result_shape)
    return Vectors()
