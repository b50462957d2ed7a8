"""Training operators that compute half a transformer block in one call; see `bindings/blocks.h`.

They are used only if the native gemms of `Vectors` compute the matmuls.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

ActivationName = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid"]


class Activation(NamedTuple):
    """An activation function. It is computed for float32, and looked up in a table for bfloat16."""

    name: ActivationName
    table: Tensor
    """(65536,) int32, indexed by the bits of a bfloat16 input. The upper half of an element is the
    derivative in bfloat16, the lower half the value."""


class NormOptions(NamedTuple):
    """Arguments of `Training.norm` other than weight and bias."""

    offset: float
    eps: float
    centred: bool
    rounded: bool


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm as arguments of the operators."""

    weight: Tensor | None
    bias: Tensor | None
    options: NormOptions


class BlockOperators:
    """Operators for a transformer block before and after attention.

    All tensors are contiguous. They have one dtype, except the weights of norms.
    """

    def norm_project(
        self,
        x: Tensor,
        branch: Tensor | None,
        norm: Norm,
        matrices: list[Tensor],
        biases: list[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Compute `y = norm(x + branch)`, and `y Wᵀ + bias` for each matrix W.

        Args:
            x: (rows, d_model).
            branch: shape as x, or None to compute `norm(x)`.
            norm: the norm of the rows.
            matrices: (width, d_model) each.
            biases: (width,), or None.

        Returns:
            The sum, which is x without a branch; y; the moments (see `Training.norm`); and the
            matmul results.
        """
        operator = torch.ops.workhorse.norm_project.default
        made = operator(x, branch, norm.weight, norm.bias, *norm.options, matrices, biases)
        y, moments, *rest = made
        return x if branch is None else rest.pop(0), y, moments, rest

    def norm_project_backward(  # noqa: PLR0917 - the tensors of one formula
        self,
        above: list[Tensor],
        matrices: list[Tensor],
        x: Tensor,
        moments: Tensor,
        norm: Norm,
        of_y: Tensor | None,
        other: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Backward pass of `norm_project`, without the gradients of matrices and biases.

        Args:
            above: the gradients of the matmul results.
            matrices: see `norm_project`.
            x: the sum that `norm_project` returned.
            moments: the moments that `norm_project` returned.
            norm: see `norm_project`.
            of_y: the gradient of y from other operations, or None.
            other: the gradient of x from other operations, which is added to the result, or None.

        Returns:
            The sum of `other` and the gradient of x, which is also that of the branch; and the
            gradients of the norm's weight and bias, (2, d_model) in float32.
        """
        options = norm.options
        return torch.ops.workhorse.norm_project_backward.default(
            above, matrices, x, moments, norm.weight, of_y, other, options.offset, options.centred
        )

    def feed(
        self,
        x: Tensor,
        attended: Tensor,
        norm: Norm,
        act: Activation,
        weights: list[Tensor | None],
        *,
        normed: bool = False,
    ) -> list[Tensor]:
        """Compute a block after attention: output projection, norm and feed-forward.

        `total = x + attended Oᵀ`, `y = norm(total)`, `out = total + act(y Uᵀ) Dᵀ`. A gated
        feed-forward has two matrices U and V: `out = total + (act(y Uᵀ) · (y Vᵀ)) Dᵀ`.

        Args:
            x: (rows, d_model), the input of the block.
            attended: (rows, heads · value_dim), the output of attention.
            norm: the norm between attention and feed-forward.
            act: the activation of the feed-forward.
            weights: O, D, U and, if gated, V, each followed by its bias or None.
            normed: True to add the feed-forward's result to y instead of total.

        Returns:
            total, y, its moments, out, `y Uᵀ` and, if gated, `y Vᵀ`.
        """
        matrices, biases = _apart(weights)
        return torch.ops.workhorse.feed.default(
            x,
            attended,
            matrices[0],
            biases[0],
            norm.weight,
            norm.bias,
            *norm.options,
            matrices[2:],
            biases[2:],
            matrices[1],
            biases[1],
            act.table,
            act.name,
            normed,
        )

    def feed_backward(  # noqa: PLR0917 - the tensors of one formula
        self,
        above: Tensor,
        total: Tensor,
        moments: Tensor,
        hidden: list[Tensor],
        norm: Norm,
        act: Activation,
        matrices: list[Tensor],
        *,
        normed: bool = False,
    ) -> list[Tensor]:
        """Backward pass of `feed`, without the gradients of matrices and biases.

        Args:
            above: the gradient of out.
            total: total, as `feed` returned it.
            moments: the moments, as `feed` returned them.
            hidden: `y Uᵀ` and, if gated, `y Vᵀ`, as `feed` returned them.
            norm: see `feed`.
            act: see `feed`.
            matrices: O, D, U and, if gated, V.
            normed: see `feed`.

        Returns:
            The gradients of total and attended; the gradients of the norm's weight and bias,
            (2, d_model) in float32; the output of the activation; and the gradient of each tensor
            in `hidden`.
        """
        output, down, *first = matrices
        return torch.ops.workhorse.feed_backward.default(
            above,
            total,
            moments,
            norm.weight,
            norm.options.offset,
            norm.options.centred,
            output,
            first,
            hidden,
            down,
            act.table,
            act.name,
            normed,
        )


def _apart(weights: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Split alternating matrices and biases into a list of matrices and a list of biases."""
    return [one for one in weights[::2] if one is not None], weights[1::2]


def _moments(x: Tensor) -> Tensor:
    return x.new_empty((len(x), 2), dtype=torch.float32)


def _sums(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _projected(x: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((len(x), len(matrix))) for matrix in matrices]


def _norm_project_shapes(
    x: Tensor,
    branch: Tensor | None,
    _weight: Tensor | None,
    _bias: Tensor | None,
    _offset: float,
    _eps: float,
    _centred: bool,
    _rounded: bool,
    matrices: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    total = [] if branch is None else [torch.empty_like(x)]
    return [torch.empty_like(x), _moments(x), *total, *_projected(x, matrices)]


def _feed_shapes(
    x: Tensor,
    _attended: Tensor,
    _output: Tensor,
    _output_bias: Tensor | None,
    _weight: Tensor | None,
    _bias: Tensor | None,
    _offset: float,
    _eps: float,
    _centred: bool,
    _rounded: bool,
    matrices: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    same = [torch.empty_like(x) for _ in range(3)]
    return [*same[:2], _moments(x), same[2], *_projected(x, matrices)]


def _feed_gradient_shapes(
    above: Tensor,
    total: Tensor,
    _moments: Tensor,
    _weight: Tensor | None,
    _offset: float,
    _centred: bool,
    output: Tensor,
    _first: list[Tensor],
    hidden: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    dattended = total.new_empty((len(total), output.shape[1]))
    inner = [torch.empty_like(one) for one in (hidden[0], *hidden)]
    return [torch.empty_like(above), dattended, _sums(total), *inner]


SHAPES: dict[str, Callable[..., object]] = {
    "norm_project": _norm_project_shapes,
    "norm_project_backward": lambda _, __, x, *___: (torch.empty_like(x), _sums(x)),
    "feed": _feed_shapes,
    "feed_backward": _feed_gradient_shapes,
}
"""For each operator, a function that computes the shapes of its results, for tracing."""
