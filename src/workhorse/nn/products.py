"""Matmuls and their gradients, computed for a part of the rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.devices.tape import recording


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The autocast dtype on a tensor's device, or None if autocast is off."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on a tensor's device."""
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


BLOCK = {"cpu": 2**20}
"""Number of logits converted to float32 at a time, by device type. On a CPU, the converted logits
then fit into its cache."""
LARGE_BLOCK = 2**24
"""Number of logits converted to float32 at a time on other devices."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, of the weight matrix and of the bias; None for each that is not needed."""
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies two matrices and adds the third argument, unless it is None, to each row."""


def widened(x: Tensor) -> Tensor:
    """Convert a tensor to float32 or wider; may return the given tensor itself."""
    return x.to(wide(x.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


def rows_at_once(max_logits: int, vocab: int) -> int:
    """The largest number of rows with at most `max_logits` logits together, at least 1."""
    return max(1, max_logits // vocab)


def parts_of(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into parts of `size` rows; yield each part of all tensors together.

    While the memory of a step is predicted (`workhorse.devices.tape`), parts between the third and
    the last are skipped, because they allocate the same memory as the third.
    """
    begins = range(0, max(1, len(tensors[0])), size)
    if recording():
        begins = (*begins[:3], *begins[3:][-1:])
    return (tuple(tensor[begin : begin + size] for tensor in tensors) for begin in begins)


def blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split logits into blocks of rows to convert to float32, with the same rows of `others`."""
    return parts_of(rows_of_block(logits, logits.shape[1]), logits, *others)


def rows_of_block(logits: Tensor, vocab: int) -> int:
    """The number of rows, of `vocab` logits each, that are converted to float32 at a time."""
    return rows_at_once(BLOCK.get(logits.device.type, LARGE_BLOCK), vocab)


class ProductGradients:
    """Gradients of `x Wᵀ + bias`, accumulated over parts of the rows.

    Args:
        rows: number of rows of x.
        wanted: for each of x, weight and bias, True if its gradient is needed. Other gradients are
            not computed.
        multiply: function that multiplies two matrices.
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
        """Add the next rows: `above` is the gradient of the output, `x` holds the same rows."""
        for_x, for_weight, for_bias = self._wanted
        if for_x:
            self._add_of_x(self._multiply(above, weight, None))
        if for_weight:
            self._of_weight = _sum(self._of_weight, self._multiply(above.t(), x, None))
        if for_bias:
            self._of_bias = _sum(self._of_bias, above.sum(dim=0, dtype=wide(above.dtype)))

    def result(self, weight: Tensor, bias: Tensor | None) -> Gradients:
        """The gradients of x, weight and bias; those of weight and bias in their own dtype."""
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
    """Add a part to a sum; from the second part on, the sum is in float32 or wider."""
    if total is None:
        return part
    total = widened(total)
    if total.dtype == part.dtype:
        return total.add_(part)
    for rows, more in blocks(total, part):  # in blocks, because a CPU copies what it casts
        rows.add_(more)
    return total


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a b + bias` as `nn.Linear` computes it."""
    return F.linear(a, b.t(), bias)
