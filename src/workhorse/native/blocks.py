"""Operators for whole parts of a block; see `bindings/blocks.h`.

They are used if `Vectors` computes the matmuls.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

ActivationName = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid"]


class Activation(NamedTuple):
    """An activation: computed for float32, looked up in a table for bfloat16."""

    name: ActivationName
    table: Tensor
    """(65536,) int32, indexed by the bits of a bfloat16: the slope in bfloat16 in the upper half of
    the word, the value in the lower."""


class NormOptions(NamedTuple):
    """The arguments of a norm other than its weights; see `Training.norm`."""

    offset: float
    eps: float
    centred: bool
    rounded: bool


class Norm(NamedTuple):
    """A norm in the form that the operators use."""

    weight: Tensor | None
    bias: Tensor | None
    options: NormOptions


class BlockOperators:
    """Block operators. All tensors are contiguous and share one dtype, except weights of norms."""

    def norm_project(
        self, x: Tensor, norm: Norm, matrices: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """`y = norm(x)` and `y Wᵀ + bias` for each matrix W.

        Args:
            x: (rows, d_model).
            norm: the norm of the rows.
            matrices: (width, d_model) each.
            biases: (width,), or None.

        Returns:
            y, the moments (see `Training.norm`), and the matmul results.
        """
        operator = torch.ops.workhorse.norm_project.default
        return operator(x, norm.weight, norm.bias, *norm.options, matrices, biases)

    def norm_project_backward(  # noqa: PLR0917 - the tensors of one formula
        self,
        above: list[Tensor],
        matrices: list[Tensor],
        x: Tensor,
        moments: Tensor,
        norm: Norm,
        other: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The gradient of x, plus `other`; and the gradients of the norm's weight and bias.

        Args:
            above: the gradients of the matmul results.
            matrices: see `norm_project`.
            x: see `norm_project`.
            moments: the moments that `norm_project` returned.
            norm: see `norm_project`.
            other: another gradient of x.

        Returns:
            The gradient of x, and (2, d_model) in float32.
        """
        options = norm.options
        return torch.ops.workhorse.norm_project_backward.default(
            above, matrices, x, moments, norm.weight, other, options.offset, options.centred
        )

    def feed(
        self,
        x: Tensor,
        attended: Tensor,
        norm: Norm,
        act: Activation,
        weights: list[Tensor | None],
    ) -> list[Tensor]:
        """`out = total + act(y Uᵀ) Dᵀ` for `y = norm(total)` and `total = x + attended Oᵀ`.

        With two matrices in place of U, the activation is act(first) · second.

        Args:
            x: (rows, d_model).
            attended: (rows, heads · value_dim).
            norm: the norm between attention and feed-forward.
            act: the activation of the feed-forward.
            weights: O, D, then U, each followed by its bias or None.

        Returns:
            total, y, its moments and out, then each `y Uᵀ`.
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
    ) -> list[Tensor]:
        """The gradients of `feed`, except the gradients of the matrices.

        Args:
            above: the gradient of out.
            total: total, as `feed` returned it.
            moments: the moments, as `feed` returned them.
            hidden: each `y Uᵀ`, as `feed` returned them: the inputs of the activation.
            norm: see `feed`.
            act: see `feed`.
            matrices: O, D, then U.

        Returns:
            The gradients of total and attended; the gradients of the norm's weight and bias,
            (2, d_model) in float32; the activation; and the gradient of each `hidden`.
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
        )


def _apart(weights: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Split interleaved weights into matrices and biases."""
    return [one for one in weights[::2] if one is not None], weights[1::2]


def _moments(x: Tensor) -> Tensor:
    return x.new_empty((len(x), 2), dtype=torch.float32)


def _sums(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _projected(x: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((len(x), len(matrix))) for matrix in matrices]


def _norm_project_shapes(
    x: Tensor,
    _weight: Tensor | None,
    _bias: Tensor | None,
    _offset: float,
    _eps: float,
    _centred: bool,
    _rounded: bool,
    matrices: list[Tensor],
    *_: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return torch.empty_like(x), _moments(x), _projected(x, matrices)


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
"""The shapes of each operator's results, for tracing."""
