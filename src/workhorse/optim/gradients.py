"""Gradients before an update: their norm and the factor that clips them.

A tensor lets the device go on without the host: it also says whether the update is made at all.
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
"""Numbers that are added up at once."""


def total_norm(gradients: list[Tensor], operators: Training | None = None) -> Tensor:
    """The norm of all gradients as one vector, in float32, the same on every process.

    Args:
        gradients: sharded or not.
        operators: of training, which measure tensors on the CPU.
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
    """The norm of the gradient of a model of which each process has a part."""
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
    """The same norm with the same bits however gradients are sharded by rows: one sum a row.

    Sums of many numbers are made of sums of `PIECE`, in which no number of threads makes a
    difference.
    """
    squares = [_squares_of_rows(local(gradient)) for gradient in gradients]
    total = torch.cat(whole_rows(squares, gradients))
    while total.numel() > 1:
        total = nn.functional.pad(total, (0, -total.numel() % PIECE)).view(-1, PIECE).sum(1)
    return total.sqrt().squeeze()


def _squares_of_rows(tensor: Tensor) -> Tensor:
    """The sum of the squares of each row of a tensor, of a vector each square, in float32."""
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
    """Norms of bfloat16 tensors or of their parts, in float32; PyTorch's are in bfloat16."""
    if tensors[0].device.type != "cpu":
        lengths = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            tensors, dtype=torch.float32
        )
        return list(lengths)
    # On a CPU that adds up one square after the other, which loses digits.
    values = (chunk.float() for tensor in tensors for (chunk,) in chunks(tensor))
    return [chunk.dot(chunk).sqrt() for chunk in values]


def shrink_on_device(loss: Tensor, norm: Tensor, scale: float, grad_clip: float | None) -> Tensor:
    """The factor of the gradient of a scaled loss, (), NaN where the step is not finite.

    Args:
        loss: (), mean of the batch.
        norm: (), of the gradient of the scaled loss.
        scale: of the loss.
        grad_clip: largest norm of the gradient; None for no limit.
    """
    length = norm.double() / scale
    clipped = torch.ones_like(length) if grad_clip is None else (grad_clip / length).clamp(max=1)
    finite = loss.isfinite() & length.isfinite()
    # As wide as gradients, so that one kernel multiplies all of them.
    return torch.where(finite, clipped / scale, torch.nan).float()


def refused(shrink: float | Tensor) -> Tensor | None:
    """Whether a device refuses the update, (); None if the host has decided that it is made."""
    return ~shrink.isfinite() if isinstance(shrink, Tensor) else None


def number(shrink: float | Tensor) -> float:
    """The factor where the host decides."""
    assert not isinstance(shrink, Tensor), "native operators take a number"
    return shrink
