"""A separate linear map for each group of rows: the matrix products of a mixture's experts."""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from workhorse.nn.autocast import autocast_dtype

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_ALIGNMENT = 16
"""The size in bytes of every row that the grouped kernel reads or writes is a multiple of this."""


class Groups(NamedTuple):
    """Rows sorted by group."""

    of_row: Int[Tensor, " rows"]
    """The group of each row, in ascending order."""
    ends: Int[Tensor, " groups"]
    """Where each group ends; an empty one ends where it begins. int32."""


def group_sorted(of_row: Int[Tensor, " rows"], groups: int) -> Groups:
    """The groups of rows whose group numbers ascend; without waiting for the device."""
    every = torch.arange(groups, device=of_row.device)
    return Groups(of_row, torch.searchsorted(of_row, every, right=True, out_int32=True))


class GroupedLinear(nn.Module):
    """`x[r] @ weight[g]ᵀ + bias[g]` for the group g of each row r.

    Args:
        groups: how many maps.
        in_features: width of a row.
        out_features: width of a row of the output.
        bias: whether each map has a bias.

    Under autocast it computes in the autocast type, as `nn.Linear` does.
    """

    def __init__(
        self, groups: int, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups, out_features)) if bias else None

    def forward(
        self, x: Float[Tensor, "rows in_features"], groups: Groups
    ) -> Float[Tensor, "rows out_features"]:
        return self.product(x, groups, self.weight, self.bias)

    def product(self, x: Tensor, groups: Groups, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with other weights."""
        dtype = autocast_dtype(x) or weight.dtype
        y = grouped_product(x.to(dtype), weight.to(dtype), groups.ends)
        return y if bias is None else y + bias[groups.of_row].to(dtype)


def grouped_product(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    ends: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """`x[r] @ weight[g]ᵀ`, group g being the rows up to `ends[g]`.

    It uses PyTorch's grouped kernel where that takes these shapes, otherwise one product per group.
    In bfloat16 on Hopper and Blackwell the kernel does not wait for the device. On one CPU thread
    in float32 it took 0.4 to 1.1 times as long as separate products, with 0.5 to 1,024 rows per
    group: the fewer, the less. Its backward fails on an expanded gradient that was not
    materialised, such as that of a plain sum.
    """
    if _kernel_takes(weight):
        return F.grouped_mm(x, weight.mT, offs=ends)
    sizes = cast(list[int], ends.diff(prepend=ends.new_zeros(1)).tolist())  # pyright: ignore[reportUnknownMemberType]
    pieces = zip(torch.split_with_sizes(x, sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in pieces])


def _kernel_takes(weight: Tensor) -> bool:
    """Rows of whole 16 bytes, and bfloat16 where the compiler traces it."""
    aligned = all(width * weight.itemsize % KERNEL_ALIGNMENT == 0 for width in weight.shape[1:])
    types = (torch.bfloat16,) if torch.compiler.is_compiling() else KERNEL_TYPES
    return aligned and weight.dtype in types
