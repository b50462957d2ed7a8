"""Native operators for decoding on a CPU. They support `torch.compile`, but not gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int16, Int32, Int64, UInt8
from torch import Tensor

from workhorse.native import build

GROUP = 32
"""Number of consecutive elements of a row of packed weights that share one scale."""
LANES = 16
"""Number of rows of packed weights (outputs of a linear layer) that are stored as a block."""


@dataclass(frozen=True)
class Decoding:
    """The decoding operators as methods; an instance exists only if the library is loaded."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """Linear layer for few rows: `x Wᵀ + b`, summed in float32.

        W is read once for every 64 rows of x.

        Args:
            x: bfloat16 or float32, on the CPU.
            weight: the same dtype as x, contiguous.
            bias: the same dtype as x, contiguous.
        """
        return torch.ops.workhorse.linear.default(x, weight, bias)

    def linear_each(
        self,
        x: Float[Tensor, "*batch in_features"],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Several linear layers with the same input: `x Wᵀ + b` for each weight W, in one call.

        The rows of all weights are divided among the threads, which synchronise once.

        Args:
            x: bfloat16 or float32, on the CPU.
            weights: the weight of each layer, as for `linear`; the numbers of outputs may differ.
            biases: the bias of each layer, or None.
        """
        return torch.ops.workhorse.linear_each.default(x, list(weights), list(biases))

    def packed_linear(
        self,
        x: Float[Tensor, "*batch in_features"],
        codes: UInt8[Tensor, "*experts blocks groups bytes"],
        scales: Int16[Tensor, "*experts blocks groups 16"],
        levels: UInt8[Tensor, " 16"] | None,
        bias: Float[Tensor, " out_features"] | None = None,
        *,
        out_features: int,
        ends: Int32[Tensor, " experts"] | None = None,
    ) -> Float[Tensor, "*batch out_features"]:
        """Linear layer with quantised weights of 4 or 8 bits: `x Wᵀ + b`.

        The layout of the weights is described in `ops/decoding/packed_linear.h`.

        Args:
            x: bfloat16 or float32, on the CPU; its width is 32 times the number of groups.
            codes: quantised weights in tiles of 16 outputs (a block) by 32 inputs (a group). A tile
                has 256 bytes for 4 bits and 512 bytes for 8 bits.
            scales: the scale of each output and group: the bits of a bfloat16.
            levels: for 4 bits, a table from codes to integers, with 128 added to each integer. None
                for 8 bits, whose codes are the integers plus 128.
            bias: the same dtype as x.
            out_features: number of outputs; the last block may be padded.
            ends: if x is multiplied by several weights, weight i is multiplied by the rows
                `ends[i-1]` to `ends[i]` of x; None for one weight.
        """
        operator = torch.ops.workhorse.packed_linear.default
        return operator(x, codes, scales, levels, bias, ends, out_features)

    def attend(
        self,
        q: Float[Tensor, "batch heads seq width"],
        k: Float[Tensor, "kv_heads blocks block width"],
        v: Float[Tensor, "kv_heads blocks block value_width"],
        *,
        table: Int64[Tensor, "batch blocks_of_a_row"],
        first: Int64[Tensor, "batch seq"],
        last: Int64[Tensor, "batch seq"],
        scale: float,
        slopes: Float32[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads seq value_width"]:
        """Attention over a paged cache, `softmax(q kᵀ · scale + bias) v`, which is not copied.

        Args:
            q: bfloat16 or float32, on the CPU; a few queries per sequence.
            k: the same dtype as q; the last axis is contiguous, and a block has a multiple of 16
                slots. The number of heads must be a multiple of `kv_heads`.
            v: dtype and layout as k.
            table: the block indices of each sequence, in order, at least up to the last visible
                slot.
            first: the first slot that each query sees, counted along the blocks of its sequence.
            last: one past the last slot that each query sees. A query that sees no slot gets zeros.
            scale: multiplier of the scores.
            slopes: ALiBi's slopes; the bias of a slot is `-slope · (last - 1 - slot)`. None: 0.
        """
        return torch.ops.workhorse.attend.default(q, k, v, table, first, last, scale, slopes)

    def argmax(self, logits: Float[Tensor, "batch vocab"]) -> Int64[Tensor, " batch"]:
        """Index of the largest element of each row.

        It is the first index if several elements are equal, and -1 if any element of the row is not
        finite.

        Args:
            logits: bfloat16 or float32, on the CPU, each row contiguous.
        """
        return torch.ops.workhorse.argmax.default(logits)


def load(*, wait: bool) -> Decoding:
    """Load the decoding operators. They are compiled first if they are not in the user's cache.

    Args:
        wait: True to compile now, which takes a few seconds; False to compile in the background.

    Raises:
        build.Unavailable: the operators cannot be called; the message is the reason in one line.
    """
    build.provide("decoding", _SHAPES, wait=wait)
    return Decoding()


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_each_shapes(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> list[Tensor]:
    return [_linear_shape(x, *both) for both in zip(weights, biases, strict=True)]


_SHAPES: dict[str, Callable[..., object]] = {
    "linear": _linear_shape,
    "linear_each": _linear_each_shapes,
    "packed_linear": lambda x, *others: x.new_empty((*x.shape[:-1], others[-1])),
    "attend": lambda q, k, v, *_: q.new_empty((*q.shape[:-1], v.shape[-1])),
    "argmax": lambda logits: logits.new_empty(logits.shape[:1], dtype=torch.int64),
}
