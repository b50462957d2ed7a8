"""Training on a CPU with native operators, which compute the same results and gradients as PyTorch.

A module is replaced only if its class is exactly one that an operator implements. For inputs that
the operator does not accept, the replacement computes with PyTorch.
"""

from torch import nn

from workhorse.execute.native_training.adapters import replace_adapted
from workhorse.execute.native_training.attention import replace_attention, replace_projections
from workhorse.execute.native_training.blocks import replace_blocks
from workhorse.execute.native_training.feedforward import (
    Gemm,
    replace_feed_forwards,
    replace_linear,
)
from workhorse.execute.native_training.norms import replace_norms
from workhorse.execute.native_training.vocabulary import replace_embeddings, replace_logprobs
from workhorse.native import Operators

__all__ = ["Gemm", "replace_embeddings", "train_natively"]


def train_natively(root: nn.Module, operators: Operators, *, precision: str = "highest") -> None:
    """Make a module use native operators for training, in place.

    Args:
        root: the module, on the CPU, in float32 or bfloat16.
        operators: the native operators; `training`, `matrix_unit` and `vectors` are used if they
            are available. With `decoding`, results have the bits of an exact decoding step
            (`step_natively`).
        precision: the precision of float32 gemms; see `Gemm`.
    """
    multiply = Gemm(operators, precision)
    if multiply.products:
        replace_linear(root, multiply)
        replace_adapted(root, multiply)
        replace_projections(root, multiply)
    replace_logprobs(root, multiply, operators.training)
    if operators.training is not None:
        replace_embeddings(root, operators.training)
        replace_norms(root, operators.training)
        as_decoding = None if operators.decoding is None else operators.training
        replace_feed_forwards(root, multiply, operators.training, as_decoding)
        replace_attention(root, operators.training, operators.decoding)
        replace_blocks(root, multiply)
