"""Log-probabilities of targets with their gradients: what every loss and score is a sum over.

`score` is the operation: of rows of logits it gives each target's log-probability and the log of
the sum of exponentials, optionally the entropy, and turns the logits into the gradient of a
weighted sum of these. It has a native and a compiled form. `TokenLogprobs` applies it to a head's
logits, a part of the batch at a time, so that the logits of all positions never exist.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from workhorse.nn.elementwise import Multiplier, SoftCap
from workhorse.nn.embedding import Head
from workhorse.nn.products import (
    Gradients,
    ProductGradients,
    autocast_dtype,
    parts_of,
    product,
    rows_at_once,
    rows_of_block,
    wide,
    widened,
)
from workhorse.nn.shapes import Hidden, Logits, Tokens
from workhorse.nn.watched import watched

IGNORE = -100
"""The target of a position that does not count."""
MAX_LOGITS = 2**29
"""That exist at once, in the type of the weights: 1 GiB in bfloat16. Each part of a batch reads
and writes the gradient of the head's weight, so a GPU wants few parts."""
MAX_LOGITS_ON_CPU = 2**26
MOST_WIDE = 2**27
"""Logits of a head that is not linear, in float32: 512 MiB."""
FAR = -1e4
"""Added to the largest logit, has probability 0 in every type, and times 0 it is 0."""

Scalar = Float[Tensor, ""]
Losses = Float[Tensor, " terms"]
"""Summed over targets, nats: the cross-entropy, and the z-loss, 0 where it has no weight."""
Matrix = Float[Tensor, "vocab width"]
Terms = Float[Tensor, "tokens 3"]
"""Of each token its target's log-probability, the log of the sum of exponentials, and the entropy
if it is wanted; all 0 where the target is `IGNORE`."""
Coefficients = Float[Tensor, "tokens 4"]
"""By which a loss multiplies the log-probability, the log of the sum, its square, the entropy."""


class Shaping(NamedTuple):
    """What a linear head does to its logits."""

    multiplier: float = 1.0
    cap: float | None = None


PLAIN = Shaping()


class Logprobs(NamedTuple):
    """Of each position, in nats and in float32 at least; 0 where the target is `IGNORE`."""

    target: Float[Tensor, "batch seq"]
    """The log-probability of the target."""
    logsumexp: Float[Tensor, "batch seq"]
    """The log of the sum of the exponentials of all logits."""
    entropy: Float[Tensor, "batch seq"] | None = None
    """Of the distribution."""


class Vocabulary:
    """The tokens that logits are of: here, all of them."""

    def most(self, own: int) -> int:
        """The most that any process has, where this one has so many: all cut the same blocks."""
        return own

    def places(self, targets: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        """Which targets have a logit here, and where it is in its row; (tokens, 1)."""
        here = (targets != IGNORE)[:, None]
        return here, targets[:, None].where(here, 0)

    def largest(self, of_rows: Tensor) -> Tensor:
        """Of all logits of each row, from those here."""
        return of_rows

    def add(self, of_rows: Tensor) -> Tensor:
        """Sums over all logits of each row, from those over the logits here."""
        return of_rows


WHOLE = Vocabulary()


def score(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    coefficients: Coefficients | None = None,
    *,
    shaping: Shaping = PLAIN,
    entropy: bool = False,
    vocabulary: Vocabulary = WHOLE,
) -> Terms:
    """The terms of rows of logits.

    Args:
        logits: of a head's projection. With coefficients they become the gradient of the sum of all
            terms times theirs; without, the terms have a gradient of autograd.
        targets: ids, or `IGNORE`.
        coefficients: of the terms.
        shaping: what the head does to the logits after its projection.
        entropy: whether it is wanted.
        vocabulary: the tokens that these logits are of.
    """
    counted = (targets != IGNORE)[:, None]
    here, place = vocabulary.places(targets)
    shaped = shape_logits(logits, shaping)
    largest = vocabulary.largest(shaped.detach().amax(dim=1, keepdim=True))
    below = shaped - largest
    powers = below.exp() if entropy else below.exp_()
    sums = [powers.sum(dim=1, keepdim=True), shaped.gather(1, place).where(here, 0)]
    if entropy:
        sums.append((powers * below.clamp(min=FAR)).sum(dim=1, keepdim=True))
    summed = vocabulary.add(torch.cat(sums, dim=1))
    total, chosen = summed[:, :1], summed[:, 1:2]
    logsumexp = total.log() + largest
    spread = total.log() - summed[:, 2:] / total if entropy else torch.zeros_like(total)
    terms = torch.cat((chosen - logsumexp, logsumexp, spread), dim=1).where(counted, 0)
    if coefficients is None:
        return terms
    by = coefficients.where(counted, 0)
    slope = by[:, 1:2] + 2 * by[:, 2:3] * logsumexp - by[:, :1]
    if entropy:  # its derivative by a logit is -p (log p + entropy)
        slope = slope - by[:, 3:] * (below.clamp(min=FAR) - total.log() + spread)
    gradient = powers.mul_(slope / total)
    of_target = by[:, :1].where(here, 0)
    if torch.compiler.is_compiling():  # it would not fuse a scatter with the rest
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient + of_target * (columns == place)
    else:
        gradient.scatter_add_(1, place, of_target.to(gradient.dtype))
    unshape_gradient(gradient, shaped, shaping)
    logits.copy_(gradient)
    return terms


def log_probabilities(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """The log-probability of every token, in the type of the logits; -inf for a logit of -inf."""
    return logits.log_softmax(dim=-1)


def normaliser(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch 1"]:
    """The log of the sum of the exponentials of logits: what turns them into log-probabilities."""
    return logits.logsumexp(dim=-1, keepdim=True)


class TokenLogprobs(nn.Module):
    """Log-probabilities of targets; logits are computed again for their gradient.

    No more than `max_logits` logits exist at once, in the type of x, and blocks of them in float32,
    all of them where the head is not linear. What is frozen gets no gradient and costs nothing.

    Args:
        max_logits: the most that exist at once; None: `default_max_logits`, and no more than
            `MOST_WIDE` where the head is not linear. Gradients of parts of the batch add up in
            float32.
        entropy: whether to give the entropy, too.

    Attributes:
        vocabulary: the tokens of the head.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(self, max_logits: int | None = None, *, entropy: bool = False) -> None:
        super().__init__()
        self.max_logits = max_logits
        self.entropy = entropy

    def forward(
        self, x: Hidden, targets: Tokens, head: Head, matrix: Matrix | None = None
    ) -> Logprobs:
        """The log-probabilities of the targets.

        Args:
            x: (batch, seq, d_model) what the head reads.
            targets: (batch, seq) ids, or `IGNORE`.
            head: that makes logits of it.
            matrix: what the method of that name gave before x was computed; may be left out.
        """
        terms = self.terms(x, targets.flatten(), head, matrix).view(*targets.shape, 3)
        target, logsumexp, entropy = terms.unbind(dim=-1)
        return Logprobs(target, logsumexp, entropy if self.entropy else None)

    def terms(
        self, x: Hidden, targets: Int[Tensor, " tokens"], head: Head, matrix: Matrix | None = None
    ) -> Terms:
        """As `forward`, together."""
        if is_linear(head):
            matrix = self.matrix(head) if matrix is None else matrix
            apply = cast(Callable[..., Tensor], _LinearTerms.apply)
            x = self.read(x, head).flatten(0, 1)
            return apply(x, matrix, head.proj.bias, targets, shaping_of(head), self)
        most = self.max_logits or min(default_max_logits(x.device), MOST_WIDE)
        rows = rows_at_once(most, head.vocab_size)
        given = torch.split(x.flatten(0, 1), rows), torch.split(targets, rows)
        parts = list(zip(*given, strict=True))
        if len(parts) == 1:
            return self._of_any_head(head, *parts[0])
        call = cast(Callable[..., Tensor], checkpoint)
        return torch.cat(
            [call(self._of_any_head, head, *part, use_reentrant=False) for part in parts]
        )

    def matrix(self, head: Head) -> Matrix:
        """The matrix of a head as it is used here; asked for before the pass that makes x."""
        return head.proj.weight

    def read(self, x: Hidden, head: Head) -> Float[Tensor, "batch seq width"]:
        """What the projection of a head reads."""
        return head.project(head.transform(x))

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of two matrices, as `Multiply`, without gradients."""
        return product(a, b, bias)

    def score(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, " tokens"],
        coefficients: Coefficients | None,
        shaping: Shaping,
    ) -> Terms:
        """As the function of that name, without a gradient of autograd."""
        found = logits.new_empty(len(logits), 3, dtype=wide(logits.dtype))
        size = rows_of_block(logits, self.vocabulary.most(logits.shape[1]))
        others = () if coefficients is None else (coefficients,)
        for block, wanted, into, *by in parts_of(size, logits, targets, found, *others):
            terms = score(
                block,
                wanted,
                by[0] if by else None,
                shaping=shaping,
                entropy=self.entropy,
                vocabulary=self.vocabulary,
            )
            into.copy_(terms)
        return found

    def in_parts(
        self,
        x: Float[Tensor, "tokens width"],
        targets: Int[Tensor, " tokens"],
        matrix: Matrix,
        bias: Float[Tensor, " vocab"] | None,
        shaping: Shaping,
        *,
        coefficients: Coefficients | None = None,
        wanted: Sequence[bool] = (False, False, False),
    ) -> tuple[Terms, Gradients]:
        """The terms of all targets, and the gradients of x, matrix and bias that are wanted."""
        found = x.new_empty(len(x), 3, dtype=wide(x.dtype))
        gradients = ProductGradients(len(x), wanted, self.multiply)
        most = self.max_logits or default_max_logits(x.device)
        size = rows_at_once(most, self.vocabulary.most(len(matrix)))
        others = () if coefficients is None else (coefficients,)
        for part, expected, into, *by in parts_of(size, x, targets, found, *others):
            logits = self.multiply(part, matrix.t(), bias)
            into.copy_(self.score(logits, expected, by[0] if by else None, shaping))
            if by:
                gradients.add(logits, part, matrix)
            del logits
        return found, gradients.result(matrix, bias)

    def _of_any_head(
        self, head: Head, x: Float[Tensor, "tokens d_model"], targets: Int[Tensor, " tokens"]
    ) -> Terms:
        return score(head(x[None])[0], targets, entropy=self.entropy)


class HeadLoss(TokenLogprobs):
    """The next-token loss of a head, whose gradient is made with it: no logits are computed twice.

    The logits, in the type of x, turn into their gradient where they stand, a block at a time in
    float32, and are multiplied out at once (the idea of Liger's fused loss, 2410.10989 §3.2). There
    is no second derivative.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Hidden,
        targets: Tokens,
        head: Head,
        *,
        z_loss: float = 0.0,
        matrix: Matrix | None = None,
        weights: Float[Tensor, "batch seq"] | None = None,
    ) -> tuple[Losses, Tensor]:
        """The summed losses, and the sum of the weights.

        Args:
            x: (batch, seq, d_model) what the head reads.
            targets: (batch, seq) the token after each position, or `IGNORE`.
            head: that makes logits of it.
            z_loss: see `next_token_loss`.
            matrix: what the method of that name gave before x was computed; may be left out.
            weights: (batch, seq) of the targets; None: 1 for each.

        Returns:
            The two terms apart, which have one gradient, that of their sum; and the sum of the
            weights: without any, how many targets count.
        """
        count = count_of(targets, weights)
        expected = targets.flatten()
        of_each = None if weights is None else weights.flatten()
        if not self.fuses(x, head):
            return losses_of(self.terms(x, expected, head), z_loss, of_each), count
        matrix = self.matrix(head) if matrix is None else matrix
        x = self.read(x, head).flatten(0, 1)
        learn = torch.is_grad_enabled()
        others = expected, of_each, z_loss, shaping_of(head), learn, self
        apply = cast(Callable[..., Tensor], _LinearLoss.apply)
        return apply(x, matrix, head.proj.bias, *others), count

    def fuses(self, x: Hidden, head: Head) -> bool:
        """Whether the gradient is made with the loss.

        Not under autocast to float16, where the loss must be scaled before.
        """
        return is_linear(head) and not autocast_dtype(x)


def next_token_loss(
    logits: Logits,
    targets: Tokens,
    z_loss: float = 0.0,
    weights: Float[Tensor, "batch seq"] | None = None,
) -> tuple[Scalar, Tensor]:
    """The summed loss in nats, and how many targets count.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) the token after each position, or `IGNORE`.
        z_loss: weight of `log²(sum(exp(logits)))`, which keeps the logits from drifting
            (PaLM, 2204.02311 §5).
        weights: (batch, seq) of the targets; the count is their sum. None: 1 for each.
    """
    of_each = None if weights is None else weights.flatten()
    losses = losses_of(score(logits.flatten(0, 1), targets.flatten()), z_loss, of_each)
    return losses.sum(), count_of(targets, weights)


def losses_of(terms: Terms, z_loss: float, weights: Float[Tensor, " tokens"] | None) -> Losses:
    """The cross-entropy and the z-loss, summed over tokens in float64: in any order the same."""
    target, logsumexp, _ = terms.double().unbind(dim=1)
    each = torch.stack((-target, z_loss * logsumexp.square()))
    if weights is not None:  # an infinite loss of weight 0 is 0, not NaN
        each = each.masked_fill(weights == 0, 0) * weights
    return each.sum(dim=1).to(terms.dtype)


def count_of(targets: Tokens, weights: Float[Tensor, "batch seq"] | None) -> Tensor:
    """How many targets count, or the sum of their weights."""
    counted = targets != IGNORE
    return counted.sum() if weights is None else weights.masked_fill(~counted, 0).sum()


def is_linear(head: Head) -> bool:
    """True if a head is one matmul and a `Shaping`, and no hook must see its parts."""
    parts = (head, head.proj, head.multiply, head.cap)
    defining = next(kind for kind in type(head).__mro__ if "forward" in vars(kind))
    return (
        vars(defining).get("linear", False)
        and type(head.proj) is nn.Linear
        and type(head.multiply) in (nn.Identity, Multiplier)
        and type(head.cap) in (nn.Identity, SoftCap)
        and not watched(*parts)
    )


def shaping_of(head: Head) -> Shaping:
    """What a head does to the logits of its projection."""
    scale, cap = head.multiply, head.cap
    return Shaping(
        scale.multiplier if isinstance(scale, Multiplier) else 1.0,
        cap.cap if isinstance(cap, SoftCap) else None,
    )


def shape_logits(logits: Tensor, shaping: Shaping) -> Tensor:
    """The logits as the head gives them, in float32 at least; they may be the tensor given."""
    shaped = widened(logits)
    if shaping.multiplier != 1:
        shaped = shaped * shaping.multiplier
    if shaping.cap is not None:
        shaped = shaping.cap * torch.tanh(shaped / shaping.cap)
    return shaped


def unshape_gradient(gradient: Tensor, shaped: Tensor, shaping: Shaping) -> None:
    """Turn the gradient of `shape_logits` into that of what it was given, in place."""
    if shaping.cap is not None:
        gradient *= 1 - (shaped / shaping.cap).square()
    if shaping.multiplier != 1:
        gradient *= shaping.multiplier


def default_max_logits(device: torch.device) -> int:
    """How many logits exist at once on a device if `max_logits` is None."""
    return MAX_LOGITS_ON_CPU if device.type == "cpu" else MAX_LOGITS


class _LinearTerms(torch.autograd.Function):
    """Terms, and in the backward pass the logits again, which become the gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Float[Tensor, "tokens width"],
        matrix: Matrix,
        bias: Float[Tensor, " vocab"] | None,
        targets: Int[Tensor, " tokens"],
        shaping: Shaping,
        way: TokenLogprobs,
    ) -> Terms:
        ctx.save_for_backward(x, matrix, bias, targets)
        ctx.shaping, ctx.way = shaping, way
        terms, _ = way.in_parts(x, targets, matrix, bias, shaping)
        return terms

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *above: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, matrix, bias, targets = ctx.saved_tensors
        by_target, by_sum, by_entropy = above[0].unbind(dim=1)
        coefficients = torch.stack((by_target, by_sum, torch.zeros_like(by_sum), by_entropy), dim=1)
        _, gradients = ctx.way.in_parts(
            x,
            targets,
            matrix,
            bias,
            ctx.shaping,
            coefficients=coefficients,
            wanted=ctx.needs_input_grad[:3],
        )
        return (*gradients, *[None] * 3)


class _LinearLoss(torch.autograd.Function):
    """The losses of `HeadLoss`; their gradient is made in the forward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Float[Tensor, "tokens width"],
        matrix: Matrix,
        bias: Float[Tensor, " vocab"] | None,
        targets: Int[Tensor, " tokens"],
        weights: Float[Tensor, " tokens"] | None,
        z_loss: float,
        shaping: Shaping,
        learn: bool,
        way: HeadLoss,
    ) -> Losses:
        coefficients = None
        if learn:
            ones = x.new_ones(len(x), dtype=wide(x.dtype)) if weights is None else weights
            none = torch.zeros_like(ones)
            coefficients = torch.stack((-ones, none, z_loss * ones, none), dim=1)
        wanted = [learn and one for one in ctx.needs_input_grad[:3]]
        terms, ctx.gradients = way.in_parts(
            x, targets, matrix, bias, shaping, coefficients=coefficients, wanted=wanted
        )
        return losses_of(terms, z_loss, weights)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the loss cannot be differentiated twice; leave create_graph out")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "the loss gave its gradients away in its first backward pass; compute it again"
            )
        of_sum = above[0][0]  # of both terms, which are always added up
        scaled = [None if gradient is None else gradient.mul_(of_sum) for gradient in gradients]
        return (*scaled, *[None] * 6)
