"""Gemms of float32 or bfloat16 with vectors of 32 or 64 bytes; see `ops/gemm/vectors.h`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.devices.instructions import cpu_has
from workhorse.native import build
from workhorse.native.matrix_unit import linear, result_shape


class Sum(NamedTuple):
    """`a₁ b₁ + a₂ b₂ + … + bias` of matrices."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Vectors:
    """The gemms; an instance exists only if they are compiled.

    The rounding of an element depends on the inner size and, in bfloat16, on whether it is widened.
    They compute no gradients.
    """

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def gemm(
        self,
        a: Float[Tensor, "rows inner"],
        b: Float[Tensor, "inner columns"],
        bias: Float[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, "rows columns"]:
        """`a b + bias`, summed in float32.

        Args:
            a: float32 or bfloat16, on the CPU, with rows or columns contiguous.
            b: as a.
            bias: an element for each column, of the same dtype.
        """
        return torch.ops.workhorse.product.default(a, b, bias)

    def gemms(self, sums: Sequence[Sum]) -> list[Tensor]:
        """Several sums of matmuls in one call, each divided among all threads; see `gemm`."""
        pairs = [(number, *pair) for number, one in enumerate(sums) for pair in one.pairs]
        of, a, b = map(list, zip(*pairs, strict=True))
        return torch.ops.workhorse.products.default(a, b, of, [one.bias for one in sums])

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """`x Wᵀ + bias`, for any order of x in memory; see `gemm`."""
        return linear(self.gemm, x, weight, bias)


def load(*, wait: bool) -> Vectors:
    """The operators; compiled first if this machine has never compiled them. See `decoding.load`.

    Raises:
        build.Unavailable: they cannot be called; the message is the reason in one line.
    """
    if not cpu_has("avx2"):
        raise build.Unavailable("the CPU has no vectors of 32 bytes (AVX2)")
    return _load(build.ensure("vectors", wait=wait))


@functools.cache
def _load(library: Path) -> Vectors:
    build.load(library)
    torch.library.register_fake("workhorse::product", result_shape)
    torch.library.register_fake("workhorse::products", _result_shapes)
    return Vectors()


def _result_shapes(
    a: list[Tensor], b: list[Tensor], of: list[int], biases: list[Tensor | None]
) -> list[Tensor]:
    """Shapes of the results of several gemms, for tracing."""
    firsts = map(of.index, range(len(biases)))
    return [result_shape(a[i], b[i], None) for i in firsts]
