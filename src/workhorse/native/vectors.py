"""Native gemms of float32 or bfloat16 matrices with vector instructions (AVX2 or AVX-512).

See `ops/gemm/vectors.h`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.devices.instructions import cpu_has
from workhorse.native import build
from workhorse.native.matrix_unit import linear, result_shape


class Sum(NamedTuple):
    """A sum of matmuls: `a₁ b₁ + a₂ b₂ + … + bias` for the matrices in `pairs`."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Vectors:
    """The gemms as methods; an instance exists only if the library is loaded.

    The rounding of an element depends on the inner size and, in bfloat16, on whether it is
    multiplied as float32 (`widens`). No gradients are computed.
    """

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def gemm(
        self,
        a: Float[Tensor, "rows inner"],
        b: Float[Tensor, "inner columns"],
        bias: Float[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, "rows columns"]:
        """Compute `a b + bias`, summed in float32.

        Args:
            a: float32 or bfloat16, on the CPU, with rows or columns contiguous.
            b: dtype and layout as a.
            bias: an element for each column, of the same dtype.
        """
        return torch.ops.workhorse.product.default(a, b, bias)

    def gemms(self, sums: Sequence[Sum]) -> list[Tensor]:
        """Compute several sums of matmuls in one call, each divided among all threads."""
        pairs = [(number, *pair) for number, one in enumerate(sums) for pair in one.pairs]
        of, a, b = map(list, zip(*pairs, strict=True))
        return torch.ops.workhorse.products.default(a, b, of, [one.bias for one in sums])

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """Compute `x Wᵀ + bias` with `gemm`. x may have any strides."""
        return linear(self.gemm, x, weight, bias)


def load(*, wait: bool) -> Vectors:
    """Load the gemms. They are compiled first if necessary; see `decoding.load`.

    Raises:
        build.Unavailable: they cannot be called; the message is the reason in one line.
    """
    if not cpu_has("avx2"):
        raise build.Unavailable("the CPU has no vectors of 32 bytes (AVX2)")
    shapes = {"product": result_shape, "products": _result_shapes}
    build.provide("vectors", shapes, wait=wait)
    return Vectors()


def _result_shapes(
    a: list[Tensor], b: list[Tensor], of: list[int], biases: list[Tensor | None]
) -> list[Tensor]:
    """Shapes of the results of several gemms, for tracing."""
    firsts = map(of.index, range(len(biases)))
    return [result_shape(a[i], b[i], None) for i in firsts]
