"""The length of a gradient."""

import torch
from torch import Tensor, nn

from workhorse.native import training
from workhorse.optim.master_weights import pieces


def total_norm(gradients: list[Tensor], *, native: bool = False) -> Tensor:
    """The length of all gradients as one vector, in float32; by the native operator if asked."""
    if gradients and native and all(map(training.measures, gradients)):
        return training.squared_length(gradients).sqrt()
    wide = [gradient for gradient in gradients if gradient.dtype != torch.bfloat16]
    narrow = [gradient for gradient in gradients if gradient.dtype == torch.bfloat16]
    if not narrow:
        return nn.utils.get_total_norm(wide)
    # PyTorch rounds the norm of a bfloat16 tensor to bfloat16.
    values = (piece.float() for tensor in narrow for (piece,) in pieces(tensor))
    squares = [torch.dot(piece, piece) for piece in values]
    if wide:
        squares.append(nn.utils.get_total_norm(wide).square())
    return torch.stack(squares).sum().sqrt()
