"""Products of bfloat16 or float32 matrices on a CPU with a matrix unit; see `ops/gemm.h`.

They are compiled apart from the other operators, which any CPU can use.
"""

import functools
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.instructions import cpu_has
from workhorse.native import build


def why_not(*, wait: bool) -> str | None:
    """Why `multiply` cannot be called, in one line, or None if it can.

    Args:
        wait: compile it now if that was never done on this machine, which takes a few seconds.
            Otherwise that happens in the background and this start goes without.
    """
    if not cpu_has("amx_bf16"):
        return "the CPU has no matrix unit for bfloat16"
    try:
        _load(build.ensure("gemm", wait=wait))
    except build.Unavailable as reason:
        return str(reason)
    return None


def multiply(
    a: Float[Tensor, "rows inner"],
    b: Float[Tensor, "inner columns"],
    bias: Float[Tensor, " columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """`a b + bias`, summed in float32. It computes no gradients.

    A float32 number is multiplied as the sum of two of bfloat16, which PyTorch calls "high"
    precision of float32 products. A result is off by at most 2⁻¹⁵ of `|a| |b|`, besides what
    float32 sums lose; of random numbers, 1,536 in a sum, by 2⁻²⁰.

    Args:
        a: bfloat16 or float32 on the CPU, its rows or its columns side by side in memory;
            transposed views are as good.
        b: likewise.
        bias: for each column, likewise.
    """
    return torch.ops.workhorse.gemm.default(a, b, bias)


def linear(
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    """`x Wᵀ + bias`, for any order of x in memory; see `multiply`."""
    return multiply(rows(x), weight.t(), bias).view(*x.shape[:-1], len(weight))


def rows(x: Tensor) -> Tensor:
    """The last axis of a tensor as the rows of a matrix, whose numbers lie side by side."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@functools.cache
def _load(library: Path) -> None:
    build.load(library)
    if not hasattr(torch.ops.workhorse, "gemm"):
        raise build.Unavailable("the system gives no process the matrix unit")
    torch.library.register_fake("workhorse::gemm", _shape)


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return a.new_empty((a.shape[0], b.shape[1]))
