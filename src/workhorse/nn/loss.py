"""Next-token cross-entropy, in float32."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from workhorse.nn.shapes import Hidden, Logits, Tokens

IGNORE = -100
"""The target of a position that does not count."""
Scalar = Float[Tensor, ""]
Losses = Float[Tensor, " terms"]
"""Summed over targets, nats: the cross-entropy, and the z-loss, 0 where it has no weight."""


def next_token_loss(
    logits: Logits, targets: Tokens, z_loss: float = 0.0
) -> tuple[Scalar, Int[Tensor, ""]]:
    """The summed loss in nats, and how many targets count.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) the token after each position, or `IGNORE`.
        z_loss: weight of `log²(sum(exp(logits)))`, which keeps the logits from drifting
            (PaLM, 2204.02311 §5).
    """
    losses, counted = next_token_losses(logits, targets, z_loss)
    return losses.sum(), counted


def next_token_losses(
    logits: Logits, targets: Tokens, z_loss: float = 0.0
) -> tuple[Losses, Int[Tensor, ""]]:
    """As `next_token_loss`, its two terms apart."""
    flat, expected = logits.flatten(0, 1).float(), targets.flatten()
    loss = F.cross_entropy(flat, expected, ignore_index=IGNORE, reduction="sum")
    counted = expected != IGNORE
    z = torch.zeros_like(loss)
    if z_loss:
        z = z_loss * (flat.logsumexp(dim=-1).square() * counted).sum()
    return torch.stack((loss, z)), counted.sum()


def chunked_next_token_loss(
    x: Hidden,
    targets: Tokens,
    unembed: Callable[[Hidden], Logits],
    *,
    vocab: int,
    z_loss: float = 0.0,
    max_logits: int = 2**24,
) -> tuple[Scalar, Int[Tensor, ""]]:
    """As `next_token_loss(unembed(x), targets)`, a few positions' logits at a time.

    Logits are computed again in the backward pass; the whole `(batch · seq, vocab)` never exists.

    Args:
        x: (batch, seq, d_model) what the head reads.
        targets: (batch, seq) the token after each position, or `IGNORE`.
        unembed: the head.
        vocab: how many logits the head gives for a position.
        z_loss: see `next_token_loss`.
        max_logits: how many logits may exist at once; below it nothing is computed twice.
    """
    losses, counted = chunked_next_token_losses(
        x, targets, unembed, vocab=vocab, z_loss=z_loss, max_logits=max_logits
    )
    return losses.sum(), counted


def chunked_next_token_losses(
    x: Hidden,
    targets: Tokens,
    unembed: Callable[[Hidden], Logits],
    *,
    vocab: int,
    z_loss: float = 0.0,
    max_logits: int = 2**24,
) -> tuple[Losses, Int[Tensor, ""]]:
    """As `chunked_next_token_loss`, its two terms apart."""
    chunks = -(-targets.numel() * vocab // max_logits)
    if chunks <= 1:
        return next_token_losses(unembed(x), targets, z_loss)
    rows = x.flatten(0, 1)[None].chunk(chunks, dim=1)
    expected = targets.flatten()[None].chunk(chunks, dim=1)

    def part(x: Hidden, targets: Tokens) -> tuple[Losses, Int[Tensor, ""]]:
        return next_token_losses(unembed(x), targets, z_loss)

    total, counted = x.new_zeros(2, dtype=torch.float32), targets.new_zeros(())
    for pair in zip(rows, expected, strict=True):
        losses, count = cast(
            tuple[Losses, Int[Tensor, ""]], checkpoint(part, *pair, use_reentrant=False)
        )
        total, counted = total + losses, counted + count
    return total, counted
