"""Training on a CPU with native operators: what they compute, and teach, is what PyTorch's do.

A module is replaced where it is exactly of the class that an operator knows; where what it is given
is not what the operator takes, it computes as before.
"""

from torch import nn

from workhorse.native import Operators
from workhorse.nn.head_loss import Multiply, product
from workhorse.transforms.native_training.attention import replace_attention
from workhorse.transforms.native_training.embedding import replace_embeddings
from workhorse.transforms.native_training.feedforward import replace_feed_forwards
from workhorse.transforms.native_training.linear import Gemm, replace_linear
from workhorse.transforms.native_training.loss import replace_head_loss
from workhorse.transforms.native_training.norms import replace_norms
from workhorse.transforms.record import check, record

__all__ = ["Gemm", "replace_embeddings", "train_natively"]


def train_natively(root: nn.Module, operators: Operators, *, precision: str = "highest") -> None:
    """Let a module that is trained use native operators, in place.

    Args:
        root: on the CPU, in float32 or bfloat16.
        operators: those of training and the matrix unit, as far as there are any.
        precision: of float32 products, see `Gemm`.

    Raises:
        WorkhorseError: the module carries what this cannot follow.
    """
    check(root, "train_natively")
    multiply: Multiply = product
    if operators.matrix_unit is not None:
        multiply = Gemm(operators.matrix_unit, precision)
        replace_linear(root, multiply)
    replace_head_loss(root, multiply, operators.training)
    if operators.training is not None:
        replace_embeddings(root)
        replace_norms(root, operators.training)
        replace_feed_forwards(root, multiply, operators.training)
        replace_attention(root, operators.training)
    record(root, "train_natively", operators=operators, precision=precision)
