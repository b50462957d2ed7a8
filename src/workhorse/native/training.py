"""Native operators for training on a CPU; see `bindings/training.cpp`.

A run must use them from its first step or not at all. Otherwise its result would depend on the step
at which their compilation ended.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.devices.instructions import widens
from workhorse.native import blocks, build
from workhorse.native.blocks import Activation, BlockOperators


@dataclass(frozen=True)
class Training(BlockOperators):
    """The training operators as methods; an instance exists only if the library is loaded."""

    attention_types: frozenset[torch.dtype]
    """The dtypes for which `attention` is faster than PyTorch's on this CPU."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention: `y = softmax(q kᵀ · scale + bias) v`.

        Args:
            q: (batch, heads, seq, head_dim), rows contiguous; float32, or bfloat16 with seq and
                head_dim even.
            k: shape and dtype as q.
            v: shape and dtype as q.
            scale: multiplier of the scores.
            causal: True if a query does not see later keys.
            slopes: ALiBi's slopes, (heads,) float32, contiguous; the bias of key j for query i is
                `-slope · (i - j)`. None: no bias. It needs `causal`.

        Returns:
            y, and the logsumexp of each query's scores, (batch, heads, seq), float32.
        """
        return torch.ops.workhorse.attention.default(q, k, v, scale, causal, slopes)

    def attention_backward(  # noqa: PLR0917 - the tensors of one formula
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        gradient: Tensor,
        normaliser: Tensor,
        *,
        scale: float,
        causal: bool,
        slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `y = softmax(q kᵀ · scale + bias) v` with respect to q, k and v.

        Args:
            q: (batch, heads, seq, head_dim), see `attention`.
            k: shape and dtype as q.
            v: shape and dtype as q.
            y: the output of `attention`, laid out as q.
            gradient: the gradient of y, laid out as q.
            normaliser: the logsumexps that `attention` returned.
            scale: multiplier of the scores.
            causal: True if a query does not see later keys.
            slopes: see `attention`.
        """
        operator = torch.ops.workhorse.attention_backward.default
        return operator(q, k, v, y, gradient, normaliser, scale, causal, slopes)

    def activation(self, x: Tensor, up: Tensor | None, act: Activation) -> Tensor:
        """Compute `act(x) · up`, or `act(x)` if `up` is None.

        Args:
            x: float32 or bfloat16, contiguous.
            up: shape and dtype as x, or None.
            act: the activation.
        """
        return torch.ops.workhorse.activation.default(x, up, act.table, act.name)

    def activation_backward(
        self, gradient: Tensor, x: Tensor, up: Tensor | None, act: Activation
    ) -> list[Tensor]:
        """Return the result of `activation`, the gradient of x and, if given, the gradient of `up`.

        Args:
            gradient: the gradient of the result.
            x: see `activation`.
            up: see `activation`.
            act: see `activation`.
        """
        operator = torch.ops.workhorse.activation_backward.default
        return operator(gradient, x, up, act.table, act.name)

    def score_(
        self,
        logits: Tensor,
        targets: Tensor,
        coefficients: Tensor | None,
        *,
        multiplier: float,
        entropy: bool,
    ) -> Tensor:
        """Compute `workhorse.nn.logprobs.score` for logits without a cap: (tokens, 3) float32.

        Args:
            logits: (tokens, vocab), float32 or bfloat16, contiguous; if coefficients are given, the
                logits are overwritten with their gradient.
            targets: (tokens,) int64; targets `IGNORE` (-100) are ignored. Any other value outside
                [0, vocab) raises a RuntimeError.
            coefficients: (tokens, 4) float32, contiguous.
            multiplier: multiplier of the logits.
            entropy: True to compute the entropy.
        """
        operator = torch.ops.workhorse.score_.default
        return operator(logits, targets, coefficients, multiplier, entropy)

    def sum_rows(self, ids: Tensor, rows: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """Sum the rows that have the same id, in float32.

        Args:
            ids: (rows,) int64, contiguous.
            rows: (rows, width), float32 or bfloat16, contiguous.
            vocab: each id is below this number.

        Returns:
            The distinct ids, ascending, and the sum of the rows of each, in the rows' dtype.
        """
        return torch.ops.workhorse.sum_rows.default(ids, rows, vocab)

    def norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        offset: float,
        eps: float,
        centred: bool,
        rounded: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """LayerNorm or RMSNorm over the last axis, computed in float32.

        `(x - mean) / sqrt(var + eps) · (offset + weight) + bias`

        Args:
            x: float32 or bfloat16, contiguous.
            weight: float32 or bfloat16, or None for ones.
            bias: float32 or bfloat16, or None for zeros.
            offset: added to the weight.
            eps: added to the variance.
            centred: True to subtract the mean; False for RMSNorm, whose mean is 0 in this formula.
            rounded: True to also round to the dtype of x before the multiplication by the weight;
                not supported with `centred`.

        Returns:
            The normed rows; and the moments, each row's mean and `1 / sqrt(var + eps)`, (rows, 2),
            float32.
        """
        return torch.ops.workhorse.norm.default(x, weight, bias, offset, eps, centred, rounded)

    def add_norm(
        self,
        x: Tensor,
        branch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        offset: float,
        eps: float,
        centred: bool,
        rounded: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `x + branch` and the norm of this sum; see `norm`.

        Returns:
            The sum, its normed rows, and its moments.
        """
        operator = torch.ops.workhorse.add_norm.default
        return operator(x, branch, weight, bias, offset, eps, centred, rounded)

    def norm_backward(
        self,
        gradient: Tensor,
        x: Tensor,
        moments: Tensor,
        weight: Tensor | None,
        other: Tensor | None,
        *,
        offset: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """Backward pass of `norm`.

        Args:
            gradient: the gradient of the normed rows, contiguous.
            x: the input of the norm.
            moments: the moments that `norm` returned.
            weight: see `norm`.
            other: the gradient of x from other operations, which is added to the result;
                contiguous, or None.
            offset: see `norm`.
            centred: see `norm`.

        Returns:
            The sum of `other` and the gradient of x; and the gradients of weight and bias,
            (2, width) float32.
        """
        operator = torch.ops.workhorse.norm_backward.default
        return operator(gradient, x, moments, weight, other, offset, centred)

    def measures(self, x: Tensor) -> bool:
        """True if `squared_length` accepts a tensor."""
        return (
            x.device.type == "cpu"
            and x.dtype in (torch.float32, torch.bfloat16)
            and x.is_contiguous()
        )

    def squared_length(self, tensors: list[Tensor]) -> Tensor:
        """Sum of the squares of all elements of all tensors, in float32 and in a fixed order.

        Args:
            tensors: at least one, float32 or bfloat16, contiguous.
        """
        return torch.ops.workhorse.squared_length.default(tensors)

    def adamw_(  # noqa: PLR0917 - the tensors of one formula
        self,
        weights: list[Tensor],
        low_bits: list[Tensor],
        gradients: list[Tensor],
        means: list[Tensor],
        mean_squares: list[Tensor],
        updates: list[Tensor],
        *,
        grad_scale: float,
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        """Update weights with AdamW, in place, in one pass over memory. Tensors are contiguous.

        Args:
            weights: float32 weights, or the bfloat16 parts of float32 weights that
                `optim.master_weights` split.
            low_bits: the int16 parts of split weights; empty for float32 weights.
            gradients: bfloat16 or float32; multiplied by `grad_scale`.
            means: first moments, bfloat16 or float32.
            mean_squares: second moments, float32.
            updates: (), float32, for each weight: its number of updates so far, incremented in
                place.
            grad_scale: see `gradients`.
            rate: the learning rate.
            beta1: see AdamW.
            beta2: see AdamW.
            eps: see AdamW.
            weight_decay: see AdamW.
        """
        torch.ops.workhorse.adamw_.default(
            weights,
            low_bits,
            gradients,
            means,
            mean_squares,
            updates,
            grad_scale,
            rate,
            beta1,
            beta2,
            eps,
            weight_decay,
        )

    def muon_directions(
        self,
        gradients: list[Tensor],
        momenta: Tensor,
        *,
        grad_scale: float,
        momentum: float,
        nesterov: bool,
    ) -> Tensor:
        """First part of a Muon update: add gradients to the momenta, in place.

        Args:
            gradients: gradients of matrices or stacks (…, rows, columns), bfloat16 or float32.
            momenta: (gradients, …, rows, columns), float32.
            grad_scale: multiplier of the gradients.
            momentum: see Muon.
            nesterov: see Muon.

        Returns:
            The matrices to orthogonalise, (matrices, shorter side, longer side), bfloat16. Each has
            norm 1.
        """
        operator = torch.ops.workhorse.muon_directions.default
        return operator(gradients, momenta, grad_scale, momentum, nesterov)

    def split_move_(
        self,
        weights: list[Tensor],
        low_bits: list[Tensor],
        updates: Tensor,
        *,
        kept: float,
        size: float,
    ) -> None:
        """Last part of a Muon update: set weights to `weight · kept - size · update`, in place.

        Args:
            weights: matrices or stacks of one shape (…, rows, columns), the bfloat16 parts of
                weights split by `optim.master_weights`.
            low_bits: the low bits of the weights, int16.
            updates: (matrices, shorter side, longer side), bfloat16.
            kept: multiplier of the weights.
            size: multiplier of the updates.
        """
        torch.ops.workhorse.split_move_.default(weights, low_bits, updates, kept, size)


def load(*, wait: bool) -> Training:
    """Load the training operators. They are compiled first if necessary; see `resolve`.

    Raises:
        build.Unavailable: they cannot be called; the message is the reason in one line.
    """
    build.provide("training", _SHAPES | blocks.SHAPES, wait=wait)
    return Training(_attention_types())


def _attention_types() -> frozenset[torch.dtype]:
    """Value of `Training.attention_types` on this machine.

    float32, and bfloat16 unless it needs oneDNN's gemms and PyTorch was built without oneDNN.
    """
    if widens() or torch.backends.mkldnn.is_available():
        return frozenset({torch.float32, torch.bfloat16})
    return frozenset({torch.float32})


def _gradient_shapes(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
            1, 2
        )

    return like(q), like(k), like(v)


def _attention_shapes(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    return y.transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)


def _norm_shapes(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    moments = x.new_empty((x.numel() // x.shape[-1], 2), dtype=torch.float32)
    return torch.empty_like(x), moments


def _add_norm_shapes(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_norm_shapes(x)


def _norm_gradient_shapes(gradient: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sums = gradient.new_empty((2, gradient.shape[-1]), dtype=torch.float32)
    return torch.empty_like(gradient), sums


def _activation_gradient_shapes(
    gradient: Tensor, x: Tensor, up: Tensor | None, *act: object
) -> list[Tensor]:
    del gradient, act
    return [torch.empty_like(x) for _ in range(2 if up is None else 3)]


def _sum_shapes(ids: Tensor, rows: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    del vocab
    used = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(used), rows.new_empty(used, rows.shape[1])


def _direction_shapes(gradients: list[Tensor], momenta: Tensor, *_: object) -> Tensor:
    del gradients
    rows, columns = momenta.shape[-2:]
    shape = (momenta.numel() // (rows * columns), min(rows, columns), max(rows, columns))
    return momenta.new_empty(shape, dtype=torch.bfloat16)


_SHAPES: dict[str, Callable[..., object]] = {
    "attention": _attention_shapes,
    "attention_backward": _gradient_shapes,
    "activation": lambda x, *_: torch.empty_like(x),
    "activation_backward": _activation_gradient_shapes,
    "norm": _norm_shapes,
    "add_norm": _add_norm_shapes,
    "norm_backward": _norm_gradient_shapes,
    "score_": lambda logits, *_: logits.new_empty((len(logits), 3), dtype=torch.float32),
    "sum_rows": _sum_shapes,
    "squared_length": lambda tensors: tensors[0].new_empty((), dtype=torch.float32),
    "adamw_": lambda *_: None,
    "muon_directions": _direction_shapes,
    "split_move_": lambda *_: None,
}
"""For each operator, a function that computes the shapes of its results, for tracing. Gradient
formulas are not registered, because calling them through PyTorch's registry takes about 45 µs
longer than an `autograd.Function` that calls the operators."""
