"""Matmuls and their gradients, some of the rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.devices.tape import recording


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes in on a tensor's device; None: it is off."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on a tensor's device."""
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


BLOCK = {"cpu": 2**20}
"""Logits that are in float32 at once: on a CPU what its cache holds."""
LARGE_BLOCK = 2**24
"""The same on every other device."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, of the matrix and of the bias."""
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies two matrices and adds the third argument, unless it is None, to each row."""


def widened(x: Tensor) -> Tensor:
    """In float32 at least; it may be the tensor given."""
    return x.to(wide(x.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 where a type has as much."""
    return torch.promote_types(dtype, torch.float32)


def rows_at_once(max_logits: int, vocab: int) -> int:
    """How many rows of logits are no more than so many numbers, and one at least."""
    return max(1, max_logits // vocab)


def parts_of(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of tensors, so many at a time.

    While a step is recorded, what lies between the third part and the last is left out: it would
    do what the third does, which is the first that meets a sum in float32.
    """
    begins = range(0, max(1, len(tensors[0])), size)
    if recording():
        begins = (*begins[:3], *begins[3:][-1:])
    return (tuple(tensor[begin : begin + size] for tensor in tensors) for begin in begins)


def blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of logits, few enough to be in float32 at once, with what belongs to them."""
    return parts_of(rows_of_block(logits, logits.shape[1]), logits, *others)


def rows_of_block(logits: Tensor, vocab: int) -> int:
    """The number of rows of logits that are in float32 at once, with so many in a row."""
    return rows_at_once(BLOCK.get(logits.device.type, LARGE_BLOCK), vocab)


class ProductGradients:
    """Gradients of `x Wᵀ + bias`, from the gradient of the product in parts of its rows.

    Args:
        rows: of x.
        wanted: of x, the weight and the bias; of what is not, nothing is computed.
        multiply: gives the product of two matrices.
    """

    def __init__(self, rows: int, wanted: Sequence[bool], multiply: Multiply) -> None:
        self._rows = rows
        self._wanted = wanted
        self._multiply = multiply
        self._done = 0
        self._of_x: Tensor | None = None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, above: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take the gradient of the next rows of the product, whose rows of x these are."""
        for_x, for_weight, for_bias = self._wanted
        if for_x:
            self._add_of_x(self._multiply(above, weight, None))
        if for_weight:
            self._of_weight = _sum(self._of_weight, self._multiply(above.t(), x, None))
        if for_bias:
            self._of_bias = _sum(self._of_bias, above.sum(dim=0, dtype=wide(above.dtype)))

    def result(self, weight: Tensor, bias: Tensor | None) -> Gradients:
        """Of x, of the weight and of the bias, each in the type of its own."""
        return (
            self._of_x,
            None if self._of_weight is None else self._of_weight.to(weight.dtype),
            None if self._of_bias is None or bias is None else self._of_bias.to(bias.dtype),
        )

    def _add_of_x(self, part: Tensor) -> None:
        if len(part) == self._rows:
            self._of_x = part
            return
        if self._of_x is None:
            self._of_x = part.new_empty(self._rows, part.shape[1])
        self._of_x[self._done : self._done + len(part)] = part
        self._done += len(part)


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """In float32 at least from the second part on."""
    if total is None:
        return part
    total = widened(total)
    if total.dtype == part.dtype:
        return total.add_(part)
    for rows, more in blocks(total, part):  # of all that it casts, a CPU makes a copy
        rows.add_(more)
    return total


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a b + bias` as `nn.Linear` computes it."""
    return F.linear(a, b.t(), bias)
