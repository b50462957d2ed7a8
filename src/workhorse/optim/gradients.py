"""Gradients before an update: their norm and the factor that clips them.

As a tensor, the factor also decides whether the update is made, so that the device need not wait
for the host.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workhorse.native import Training
from workhorse.optim.master_weights import MasterWeights, chunks
from workhorse.optim.shards import is_sharded, local, summed_over_shards, whole_rows

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import ModelPart

PIECE = 1024
"""Number of elements that are summed at once."""


def total_norm(gradients: list[Tensor], operators: Training | None = None) -> Tensor:
    """Norm of all gradients as one vector, in float32, the same on every rank.

    Args:
        gradients: the gradients, sharded or not.
        operators: native training operators, which compute the norm of CPU tensors.
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
    """Norm of the gradient of a model that is divided over ranks, from this rank's part."""
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
    """`total_norm` with bits that do not depend on a sharding by rows: one sum per row.

    Long sums are computed from sums of `PIECE` elements, which do not depend on the number of
    threads.
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
    """Norms of bfloat16 tensors or of their chunks, in float32; PyTorch's are in bfloat16."""
    if tensors[0].device.type != "cpu":
        lengths = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            tensors, dtype=torch.float32
        )
        return list(lengths)
    # On a CPU `_foreach_norm` adds one square after the other, which loses precision.
    values = (chunk.float() for tensor in tensors for (chunk,) in chunks(tensor))
    return [chunk.dot(chunk).sqrt() for chunk in values]


def shrink_on_device(loss: Tensor, norm: Tensor, scale: float, grad_clip: float | None) -> Tensor:
    """Factor of the gradient of a scaled loss, (); NaN if the step is not finite.

    Args:
        loss: (), mean of the batch.
        norm: (), norm of the gradient of the scaled loss.
        scale: factor of the loss.
        grad_clip: largest norm of the gradient; None for no limit.
    """
    length = norm.double() / scale
    clipped = torch.ones_like(length) if grad_clip is None else (grad_clip / length).clamp(max=1)
    finite = loss.isfinite() & length.isfinite()
    # In float32 like the gradients, so that one kernel multiplies all gradients.
    return torch.where(finite, clipped / scale, torch.nan).float()


def refused(grad_scale: float | Tensor) -> Tensor | None:
    """True, as a tensor (), if the device skips the update; None if the host decided to make it."""
    return ~grad_scale.isfinite() if isinstance(grad_scale, Tensor) else None


def number(grad_scale: float | Tensor) -> float:
    """The factor as a float, for updates that the host decides."""
    assert not isinstance(grad_scale, Tensor), "native operators need a float"
    return grad_scale
