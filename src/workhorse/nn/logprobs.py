"""Log-probabilities of given tokens, with their gradient: what every objective is made of."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from workhorse.nn.head import Head
from workhorse.nn.head_loss import (
    ProductGradients,
    Shaping,
    blocks,
    default_max_logits,
    is_linear,
    parts_of,
    product,
    rows_at_once,
    shape_logits,
    shaping_of,
    unshape_gradient,
)
from workhorse.nn.loss import IGNORE
from workhorse.nn.shapes import Hidden, Tokens

MOST_WIDE = 2**27
"""Logits of a head that is not linear, in float32: 512 MiB."""
Logprobs = Float[Tensor, "batch seq"]


def token_logprobs(
    x: Hidden, targets: Tokens, head: Head, *, max_logits: int | None = None
) -> Logprobs:
    """`log_softmax(head(x))` at each target, in nats and float32; 0 where a target is `IGNORE`.

    No more than `max_logits` logits exist at once, in the type of x, and blocks of them in float32,
    all of them where the head is not linear: they are computed again for the gradient. What is
    frozen gets none and costs nothing.

    Args:
        x: (batch, seq, d_model) what the head reads.
        targets: (batch, seq) ids.
        head: that makes logits of it.
        max_logits: the most that exist at once; None: `default_max_logits`, and no more than
            `MOST_WIDE` where the head is not linear. Gradients of parts of the batch add up in
            float32.
    """
    expected = targets.flatten()
    linear, most = is_linear(head), default_max_logits(x.device)
    most = max_logits or (most if linear else min(most, MOST_WIDE))
    rows = rows_at_once(most, head.vocab_size)
    if linear:
        x = head.project(head.transform(x))
        apply = cast(Callable[..., Tensor], _LinearTokenLogprobs.apply)
        weights = head.proj.weight, head.proj.bias
        found = apply(x.flatten(0, 1), *weights, expected, shaping_of(head), rows)
        return found.view(targets.shape)
    parts = zip(torch.split(x.flatten(0, 1), rows), torch.split(expected, rows), strict=True)
    call = cast(Callable[..., Tensor], checkpoint)
    each = [call(_of_any_head, head, *part, use_reentrant=False) for part in parts]
    return torch.cat(each).view(targets.shape)


def _of_any_head(
    head: Head, x: Float[Tensor, "tokens d_model"], targets: Int[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    shaped = shape_logits(head(x[None])[0], Shaping())
    chosen = shaped.gather(1, _known(targets)[:, None])[:, 0]
    return (chosen - shaped.logsumexp(dim=1)) * (targets != IGNORE)


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Float[Tensor, "tokens width"],
        weight: Float[Tensor, "vocab width"],
        bias: Float[Tensor, " vocab"] | None,
        targets: Int[Tensor, " tokens"],
        shaping: Shaping,
        rows: int,
    ) -> Float[Tensor, " tokens"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        chosen, normaliser = x.new_empty(2, len(x), dtype=wide)
        for part, *of_part in parts_of(rows, x, targets, chosen, normaliser):
            logits = product(part, weight.t(), bias)
            for block, wanted, chosen_of, normaliser_of in blocks(logits, *of_part):
                shaped = shape_logits(block, shaping)
                torch.gather(shaped, 1, _known(wanted)[:, None], out=chosen_of[:, None])
                torch.logsumexp(shaped, dim=1, out=normaliser_of)
        ctx.save_for_backward(x, weight, bias, targets, normaliser)
        ctx.shaping, ctx.rows = shaping, rows
        return (chosen - normaliser) * (targets != IGNORE)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, normaliser = ctx.saved_tensors
        gradients = ProductGradients(len(x), ctx.needs_input_grad[:3], product)
        slopes = above[0] * (targets != IGNORE)
        for part, *of_part in parts_of(ctx.rows, x, targets, normaliser, slopes):
            logits = product(part, weight.t(), bias)
            for block, *of_block in blocks(logits, *of_part):
                _into_gradient(block, *of_block, shaping=ctx.shaping)
            gradients.add(logits, part, weight)
        return (*gradients.result(weight, bias), *[None] * 3)


def _into_gradient(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    normaliser: Float[Tensor, " tokens"],
    slopes: Float[Tensor, " tokens"],
    shaping: Shaping,
) -> None:
    """Logits become the gradient of the log-probabilities' sum, each weighted by its slope."""
    shaped = shape_logits(logits, shaping)
    gradient = (shaped - normaliser[:, None]).exp_().mul_(-slopes[:, None])
    gradient.scatter_add_(1, _known(targets)[:, None], slopes[:, None])
    unshape_gradient(gradient, shaped, shaping)
    logits.copy_(gradient)


def _known(targets: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Targets with some token for `IGNORE`; what is no token otherwise stays, and is refused."""
    return targets.where(targets != IGNORE, 0)
