"""Training on a CPU with native operators: what they compute, and teach, is what PyTorch's do.

A module is replaced where it is exactly of the class that an operator knows; where what it is given
is not what the operator takes, it computes as before.
"""

from torch import nn

from workhorse.nn.head_loss import product
from workhorse.transforms.native_training.attention import replace_attention
from workhorse.transforms.native_training.embedding import replace_embeddings
from workhorse.transforms.native_training.feedforward import replace_feed_forwards
from workhorse.transforms.native_training.linear import Products, replace_linear
from workhorse.transforms.native_training.loss import replace_head_loss
from workhorse.transforms.native_training.norms import replace_norms
from workhorse.transforms.record import check, record

__all__ = ["Products", "replace_embeddings", "train_natively"]


def train_natively(root: nn.Module, *, native: bool, multiply: Products | None = None) -> None:
    """Let a module that is trained use native operators, in place.

    Args:
        root: on the CPU, in float32 or bfloat16.
        native: whether there are the operators of training, see `training.why_not`.
        multiply: the matrix unit's products; None where the CPU has none.

    Raises:
        WorkhorseError: the module carries what this cannot follow.
    """
    check(root, "train_natively")
    if multiply is not None:
        replace_linear(root, multiply)
    replace_head_loss(root, multiply or product, native=native)
    if native:
        replace_embeddings(root)
        replace_norms(root)
        replace_feed_forwards(root, multiply or product)
        replace_attention(root)
    record(root, "train_natively", operators=native, matrix_unit=multiply is not None)
