"""The norm of the gradients, and the factor that clips them before an update.

On a GPU the factor is a tensor, and NaN means that the update is skipped. The device can then
decide this without waiting for the host.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workhorse.native import Training
from workhorse.optim.master_weights import MasterWeights, chunks
from workhorse.parallel.shards import is_sharded, local, summed_over_shards, whole_rows

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import ModelPart

PIECE = 1024
"""Number of elements that `norm_by_rows` sums at once."""


def total_norm(gradients: list[Tensor], operators: Training | None = None) -> Tensor:
    """Norm of the vector of all gradients, in float32. Every rank gets the same value.

    Args:
        gradients: the gradients, sharded or not.
        operators: native training operators, for CPU tensors; None to use only PyTorch.
    """
    by_place: dict[object, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        place = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        by_place[place].append(gradient)
    if by_place.keys() <= {None}:
        return _length(gradients, operators)
    squares = [
        summed_over_shards(_length(list(map(local, some)), operators).square(), some[0])
        for some in by_place.values()
    ]
    return torch.stack(squares).sum().sqrt()


def norm_over_parts(masters: MasterWeights, part: "ModelPart") -> Tensor:
    """Norm of all gradients of a model whose layers are divided among ranks.

    A collective: all ranks that hold different parts of the model must call it.
    """
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for name, cut in part.cuts.items():
        gradient = masters.gradient(name) if name in masters.parameters else None
        if gradient is not None and not cut.again:
            by_copies[part.copies(cut)].append(gradient)
    squares = [
        total_norm(gradients, masters.operators).square() / copies
        for copies, gradients in by_copies.items()
    ]
    return part.added(torch.stack(squares).sum()).sqrt()


def norm_by_rows(gradients: list[Tensor]) -> Tensor:
    """Norm of the vector of all gradients, bitwise the same with and without sharding by rows.

    Each row is summed by itself. Long sums are computed from sums of `PIECE` elements, so that they
    do not depend on the number of threads.
    """
    squares = [_squares_of_rows(local(gradient)) for gradient in gradients]
    total = torch.cat(whole_rows(squares, gradients))
    while total.numel() > 1:
        total = nn.functional.pad(total, (0, -total.numel() % PIECE)).view(-1, PIECE).sum(1)
    return total.sqrt().squeeze()


def _squares_of_rows(tensor: Tensor) -> Tensor:
    """Sum of squares of each row of a tensor, in float32. A vector has one element per row."""
    rows = tensor.detach().float().reshape(len(tensor), tensor.shape[1:].numel())
    sums = rows.new_zeros(len(rows))
    for piece in rows.split(PIECE, dim=1):
        sums += piece.square().sum(dim=1)
    return sums


def _length(gradients: list[Tensor], operators: Training | None) -> Tensor:
    if gradients and operators is not None and all(map(operators.measures, gradients)):
        return operators.squared_length(gradients).sqrt()
    wide = [gradient for gradient in gradients if gradient.dtype != torch.bfloat16]
    narrow = [gradient for gradient in gradients if gradient.dtype == torch.bfloat16]
    if not narrow:
        return nn.utils.get_total_norm(wide)
    norms = _bfloat16_norms(narrow)
    if wide:
        norms = [*norms, nn.utils.get_total_norm(wide)]
    return torch.stack(norms).square().sum().sqrt()


def _bfloat16_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms of bfloat16 tensors, computed in float32; on a CPU, norms of their chunks."""
    if tensors[0].device.type != "cpu":
        lengths = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            tensors, dtype=torch.float32
        )
        return list(lengths)
    # On a CPU `_foreach_norm` adds one square after the other, which loses precision.
    values = (chunk.float() for tensor in tensors for (chunk,) in chunks(tensor))
    return [chunk.dot(chunk).sqrt() for chunk in values]


def shrink_on_device(loss: Tensor, norm: Tensor, scale: float, grad_clip: float | None) -> Tensor:
    """Factor that unscales and clips the gradient, as a tensor on the device.

    NaN if the loss or the norm is not finite, so that the update is skipped.

    Args:
        loss: (), mean of the batch.
        norm: (), norm of the gradient of the scaled loss.
        scale: factor by which the loss was scaled.
        grad_clip: maximum norm of the gradient; None for no limit.
    """
    length = norm.double() / scale
    clipped = torch.ones_like(length) if grad_clip is None else (grad_clip / length).clamp(max=1)
    finite = loss.isfinite() & length.isfinite()
    # In float32 like the gradients, so that one kernel multiplies all gradients.
    return torch.where(finite, clipped / scale, torch.nan).float()


def refused(grad_scale: float | Tensor) -> Tensor | None:
    """Return a boolean tensor (), True if `grad_scale` is not finite: the update must be skipped.

    None if `grad_scale` is a float: the host passes a float only if the update must be made.
    """
    return ~grad_scale.isfinite() if isinstance(grad_scale, Tensor) else None


def number(grad_scale: float | Tensor) -> float:
    """Return `grad_scale`, which must be a float; native operators do not accept a tensor."""
    assert not isinstance(grad_scale, Tensor), "native operators need a float"
    return grad_scale
