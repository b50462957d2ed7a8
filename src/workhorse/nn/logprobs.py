"""Log-probabilities of targets and their gradients, which all losses and scores are computed from.

`score` computes the target's log-probability, the logsumexp and optionally the entropy of each row
of logits. It can also replace the logits by the gradient of a weighted sum of these terms. Native
and compiled versions of it exist. `TokenLogprobs` applies it to the logits of a head, one part of
the batch at a time, so that the logits of all positions are never in memory together.
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
from workhorse.nn.surgery import has_hooks

IGNORE = -100
"""The target id of positions that are ignored."""
MAX_LOGITS = 2**29
"""Default maximum number of logits in memory on a GPU, in the dtype of the weights: 1 GiB in
bfloat16. Larger batches are split. Each part reads and writes the gradient of the head's weight, so
few large parts are faster."""
MAX_LOGITS_ON_CPU = 2**26
MOST_WIDE = 2**27
"""Maximum number of float32 logits in memory for a head that is not linear (see `is_linear`):
512 MiB."""
FAR = -1e4
"""Lower bound of `logit - largest logit` in the computation of the entropy. A logit at this bound
has probability 0 in every dtype. The bound is finite, because 0 times -inf would be NaN."""

Scalar = Float[Tensor, ""]
Losses = Float[Tensor, " terms"]
"""Cross-entropy and z-loss, each summed over the targets, in nats."""
Matrix = Float[Tensor, "vocab width"]
Terms = Float[Tensor, "tokens 3"]
"""For each token: the target's log-probability, the logsumexp, and the entropy (0 if it was not
requested). All are 0 if the target is `IGNORE`."""
Coefficients = Float[Tensor, "tokens 4"]
"""For each token, the factors that a loss puts on the target's log-probability, the logsumexp, the
squared logsumexp and the entropy."""


class Shaping(NamedTuple):
    """Multiplier and soft-cap that a linear head applies to the logits of its projection."""

    multiplier: float = 1.0
    cap: float | None = None


PLAIN = Shaping()


class Logprobs(NamedTuple):
    """Values for each position, in nats, in float32 or wider; 0 if the target is `IGNORE`."""

    target: Float[Tensor, "batch seq"]
    """The log-probability of the target."""
    logsumexp: Float[Tensor, "batch seq"]
    """The log of the sum of the exponentials of all logits."""
    entropy: Float[Tensor, "batch seq"] | None = None
    """The entropy of the predicted distribution, or None if it was not requested."""


class Vocabulary:
    """The shard of the vocabulary that this rank computes logits for.

    In this class it is the whole vocabulary. Subclasses split it and reduce results between ranks.
    """

    def most(self, own: int) -> int:
        """The largest number of logits per row on any rank; `own` is the number on this rank.

        All ranks use it to split the rows into the same blocks.
        """
        return own

    def places(self, targets: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        """Find the targets' columns in this rank's logits.

        Returns:
            A bool tensor, True if the target is in this rank's shard, and the target's column, 0 if
            it is not; both (tokens, 1).
        """
        here = (targets != IGNORE)[:, None]
        return here, targets[:, None].where(here, 0)

    def largest(self, of_rows: Tensor) -> Tensor:
        """Reduce each row's maximum over this rank's logits to the maximum over all logits."""
        return of_rows

    def add(self, of_rows: Tensor) -> Tensor:
        """Reduce each row's sums over this rank's logits to the sums over all logits."""
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
    """Compute the log-probability, logsumexp and entropy of each row of logits; see `Terms`.

    Args:
        logits: output of a head's projection. With coefficients, they are overwritten by the
            gradient of the sum of all terms times their coefficients. Without them, autograd can
            differentiate the terms.
        targets: target ids, or `IGNORE`.
        coefficients: factors on the terms; None: do not compute a gradient.
        shaping: multiplier and soft-cap of the head.
        entropy: True to compute the entropy.
        vocabulary: the shard of the vocabulary that these logits are for.
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
    if entropy:  # the derivative of the entropy by a logit is -p (log p + entropy)
        slope = slope - by[:, 3:] * (below.clamp(min=FAR) - total.log() + spread)
    gradient = powers.mul_(slope / total)
    of_target = by[:, :1].where(here, 0)
    if torch.compiler.is_compiling():  # the compiler would not fuse a scatter with the rest
        columns = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient + of_target * (columns == place)
    else:
        gradient.scatter_add_(1, place, of_target.to(gradient.dtype))
    unshape_gradient(gradient, shaped, shaping)
    logits.copy_(gradient)
    return terms


def log_probabilities(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """The log-probability of every token, in the dtype of the logits; -inf for a logit of -inf."""
    return logits.log_softmax(dim=-1)


def normaliser(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch 1"]:
    """The logsumexp of the logits. Subtracting it from logits gives log-probabilities."""
    return logits.logsumexp(dim=-1, keepdim=True)


class TokenLogprobs(nn.Module):
    """Log-probabilities of targets, from hidden states; the backward pass recomputes the logits.

    At most `max_logits` logits are in memory, in the dtype of x. They are converted to float32 in
    blocks, or all at once if the head is not linear (see `is_linear`).

    Args:
        max_logits: maximum number of logits in memory, which sets how many parts the batch is
            split into. Gradients of the parts are summed in float32. None: `default_max_logits`,
            and at most `MOST_WIDE` if the head is not linear.
        entropy: True to return the entropy also.

    Attributes:
        vocabulary: the shard of the vocabulary that this rank's head computes logits for.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(self, max_logits: int | None = None, *, entropy: bool = False) -> None:
        super().__init__()
        self.max_logits = max_logits
        self.entropy = entropy

    def forward(
        self, x: Hidden, targets: Tokens, head: Head, matrix: Matrix | None = None
    ) -> Logprobs:
        """Compute the log-probabilities of the targets.

        Args:
            x: (batch, seq, d_model) input of the head.
            targets: (batch, seq) target ids, or `IGNORE`.
            head: head that computes the logits.
            matrix: result of the method `matrix`, if it was called before x was computed.
        """
        terms = self.terms(x, targets.flatten(), head, matrix).view(*targets.shape, 3)
        target, logsumexp, entropy = terms.unbind(dim=-1)
        return Logprobs(target, logsumexp, entropy if self.entropy else None)

    def terms(
        self, x: Hidden, targets: Int[Tensor, " tokens"], head: Head, matrix: Matrix | None = None
    ) -> Terms:
        """Compute the results of `forward` as one tensor; `targets` is flattened."""
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
        """The weight of a head's projection.

        A subclass can return a tensor that delays this weight's gradient to the end of the backward
        pass. For that, call this method before the forward pass that computes x.
        """
        return head.proj.weight

    def read(self, x: Hidden, head: Head) -> Float[Tensor, "batch seq width"]:
        """Compute the input of the head's projection from the head's input."""
        return head.project(head.transform(x))

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply two matrices without autograd; see `Multiply`."""
        return product(a, b, bias)

    def score(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, " tokens"],
        coefficients: Coefficients | None,
        shaping: Shaping,
    ) -> Terms:
        """Call the function `score` for blocks of rows, without autograd."""
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
        """Compute the `Terms` of all targets, one part of the rows at a time.

        With coefficients, also compute those gradients of x, matrix and bias for which `wanted` is
        True.
        """
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
    """The next-token loss of a head; its forward pass also computes the gradient.

    The logits are computed only once. The forward pass overwrites them by their gradient, one block
    at a time in float32, and computes the gradients of x and the head's weights from it. Liger's
    fused loss does the same (2410.10989 §3.2). Second derivatives are not supported.
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
        """The summed losses, and the sum of the weights of the targets.

        Args:
            x: (batch, seq, d_model) input of the head.
            targets: (batch, seq) the token after each position, or `IGNORE`.
            head: head that computes the logits.
            z_loss: see `next_token_loss`.
            matrix: result of the method `matrix`, if it was called before x was computed.
            weights: (batch, seq) weights of the targets; None: 1 for each.

        Returns:
            The cross-entropy and the z-loss, which can only be differentiated as their sum; and the
            sum of the weights (without weights, the number of targets that are not ignored).
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
        """True if the forward pass also computes the gradient.

        False if the head is not linear, and under autocast: a float16 loss must be scaled before
        its gradient is computed.
        """
        return is_linear(head) and not autocast_dtype(x)


def next_token_loss(
    logits: Logits,
    targets: Tokens,
    z_loss: float = 0.0,
    weights: Float[Tensor, "batch seq"] | None = None,
) -> tuple[Scalar, Tensor]:
    """The summed loss in nats, and the number of targets that are not ignored.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) the token after each position, or `IGNORE`.
        z_loss: weight of `log²(sum(exp(logits)))`, which keeps the logits from drifting
            (PaLM, 2204.02311 §5).
        weights: (batch, seq) weights of the targets; the number is then their sum. None: all 1.
    """
    of_each = None if weights is None else weights.flatten()
    losses = losses_of(score(logits.flatten(0, 1), targets.flatten()), z_loss, of_each)
    return losses.sum(), count_of(targets, weights)


def losses_of(terms: Terms, z_loss: float, weights: Float[Tensor, " tokens"] | None) -> Losses:
    """Cross-entropy and z-loss, summed in float64 so that the order of tokens does not matter."""
    target, logsumexp, _ = terms.double().unbind(dim=1)
    each = torch.stack((-target, z_loss * logsumexp.square()))
    if weights is not None:  # an infinite loss of weight 0 is 0, not NaN
        each = each.masked_fill(weights == 0, 0) * weights
    return each.sum(dim=1).to(terms.dtype)


def count_of(targets: Tokens, weights: Float[Tensor, "batch seq"] | None) -> Tensor:
    """The number of targets that are not ignored, or the sum of their weights."""
    counted = targets != IGNORE
    return counted.sum() if weights is None else weights.masked_fill(~counted, 0).sum()


def is_linear(head: Head) -> bool:
    """True if a head is one matmul, a multiplier and a soft-cap, and none of them has a hook."""
    parts = (head, head.proj, head.multiply, head.cap)
    defining = next(kind for kind in type(head).__mro__ if "forward" in vars(kind))
    return (
        vars(defining).get("linear", False)
        and type(head.proj) is nn.Linear
        and type(head.multiply) in (nn.Identity, Multiplier)
        and type(head.cap) in (nn.Identity, SoftCap)
        and not has_hooks(*parts)
    )


def shaping_of(head: Head) -> Shaping:
    """The multiplier and soft-cap that a head applies to the logits of its projection."""
    scale, cap = head.multiply, head.cap
    return Shaping(
        scale.multiplier if isinstance(scale, Multiplier) else 1.0,
        cap.cap if isinstance(cap, SoftCap) else None,
    )


def shape_logits(logits: Tensor, shaping: Shaping) -> Tensor:
    """Apply multiplier and soft-cap to logits, in float32 or wider; may return `logits` itself."""
    shaped = widened(logits)
    if shaping.multiplier != 1:
        shaped = shaped * shaping.multiplier
    if shaping.cap is not None:
        shaped = shaping.cap * torch.tanh(shaped / shaping.cap)
    return shaped


def unshape_gradient(gradient: Tensor, shaped: Tensor, shaping: Shaping) -> None:
    """Backward pass of `shape_logits`: change the output's gradient into the input's, in place."""
    if shaping.cap is not None:
        gradient *= 1 - (shaped / shaping.cap).square()
    if shaping.multiplier != 1:
        gradient *= shaping.multiplier


def default_max_logits(device: torch.device) -> int:
    """The maximum number of logits in memory on a device if `max_logits` is None."""
    return MAX_LOGITS_ON_CPU if device.type == "cpu" else MAX_LOGITS


class _LinearTerms(torch.autograd.Function):
    """Autograd function for the `Terms` of a linear head; backward recomputes the logits."""

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
    """Autograd function for the losses of `HeadLoss`; forward also computes their gradients."""

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
            raise RuntimeError("the loss has no second derivative; remove create_graph=True")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "the first backward pass freed the gradients of the loss; compute the loss again"
            )
        of_sum = above[0][0]  # the same for both losses, because callers always add them
        scaled = [None if gradient is None else gradient.mul_(of_sum) for gradient in gradients]
        return (*scaled, *[None] * 6)
