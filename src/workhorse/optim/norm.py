"""The norm of a gradient."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from workhorse.native import Training
from workhorse.optim.master_weights import chunks
from workhorse.optim.shards import is_sharded, local, summed_over_shards


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


def _length(gradients: list[Tensor], operators: Training | None) -> Tensor:
    if gradients and operators is not None and all(map(operators.measures, gradients)):
        return operators.squared_length(gradients).sqrt()
    wide = [gradient for gradient in gradients if gradient.dtype != torch.bfloat16]
    narrow = [gradient for gradient in gradients if gradient.dtype == torch.bfloat16]
    if not narrow:
        return nn.utils.get_total_norm(wide)
    # PyTorch rounds the norm of a bfloat16 tensor to bfloat16.
    values = (chunk.float() for tensor in narrow for (chunk,) in chunks(tensor))
    squares = [torch.dot(chunk, chunk) for chunk in values]
    if wide:
        squares.append(nn.utils.get_total_norm(wide).square())
    return torch.stack(squares).sum().sqrt()
