"""Products of bfloat16 matrices on a CPU with a matrix unit; see `products.h`.

They are compiled apart from the other operators, which any CPU can use.
"""

import functools
from pathlib import Path

import torch
from jaxtyping import BFloat16
from torch import Tensor

from workhorse.devices import cpu_has
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
        return _load(build.ensure("products", wait=wait))
    except build.Unavailable as reason:
        return str(reason)


def multiply(
    a: BFloat16[Tensor, "rows inner"],
    b: BFloat16[Tensor, "inner columns"],
    bias: BFloat16[Tensor, " columns"] | None = None,
) -> BFloat16[Tensor, "rows columns"]:
    """`a b + bias`, summed in float32. It computes no gradients.

    Args:
        a: on the CPU, its rows or its columns side by side in memory; transposed views are as good.
        b: likewise.
        bias: for each column.
    """
    return torch.ops.workhorse.multiply.default(a, b, bias)


def linear(
    x: BFloat16[Tensor, "*batch in_features"],
    weight: BFloat16[Tensor, "out_features in_features"],
    bias: BFloat16[Tensor, " out_features"] | None = None,
) -> BFloat16[Tensor, "*batch out_features"]:
    """`x Wᵀ + bias`, for any order of x in memory; see `multiply`."""
    return multiply(rows(x), weight.t(), bias).view(*x.shape[:-1], len(weight))


def rows(x: Tensor) -> Tensor:
    """The last axis of a tensor as the rows of a matrix, whose numbers lie side by side."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@functools.cache
def _load(library: Path) -> str | None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"cannot load {library}: {error}".splitlines()[0]
    if not hasattr(torch.ops.workhorse, "multiply"):
        return "the system gives no process the matrix unit"
    torch.library.register_fake("workhorse::multiply", _shape)
    return None


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return a.new_empty((a.shape[0], b.shape[1]))
