"""The loss of a linear head with its gradient: no float32 logits, nothing computed twice."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from workhorse.devices.tape import recording
from workhorse.nn.autocast import autocast_dtype
from workhorse.nn.elementwise import Multiplier, SoftCap
from workhorse.nn.head import Head
from workhorse.nn.loss import IGNORE, Losses, chunked_next_token_losses
from workhorse.nn.shapes import Hidden, Tokens
from workhorse.nn.watched import watched

MAX_LOGITS = 2**29
"""That exist at once, in the type of the weights: 1 GiB in bfloat16. Each part of a batch reads
and writes the gradient of the head's weight, so a GPU wants few parts."""
MAX_LOGITS_ON_CPU = 2**26
BLOCK = {"cpu": 2**20}
"""Logits that are in float32 at once: on a CPU what its cache holds."""
LARGE_BLOCK = 2**24
"""The same on every other device."""


class Shaping(NamedTuple):
    """What happens to the logits of a linear head, and to their loss."""

    multiplier: float = 1.0
    cap: float | None = None
    z_loss: float = 0.0


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies two matrices and adds the third argument, unless it is None, to each row."""


Matrix = Float[Tensor, "vocab width"]


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


class HeadLoss(nn.Module):
    """`next_token_losses(head(x), targets, z_loss)`, fused where the head is linear.

    The logits, in the type of x, turn into their gradient where they stand, a block at a time in
    float32, and are multiplied out at once (the idea of Liger's fused loss, 2410.10989 §3.2). There
    is no second derivative. What is frozen gets no gradient and costs nothing.

    Args:
        max_logits: the most that exist at once; None: `default_max_logits`. Gradients of parts of
            the batch add up in float32.

    Attributes:
        vocabulary: the tokens of the head.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(self, max_logits: int | None = None) -> None:
        super().__init__()
        self.max_logits = max_logits

    def forward(
        self,
        x: Hidden,
        targets: Tokens,
        head: Head,
        z_loss: float = 0.0,
        matrix: Matrix | None = None,
    ) -> tuple[Losses, Int[Tensor, ""]]:
        """The summed losses and how many targets count.

        Args:
            x: (batch, seq, d_model) what the head reads.
            targets: (batch, seq) the token after each position, or `IGNORE`.
            head: that makes logits of it.
            z_loss: see `next_token_loss`.
            matrix: what the method of that name gave before x was computed; may be left out.

        Returns:
            The two terms apart, which have one gradient, that of their sum; and the count.
        """
        # Under autocast to float16 the loss must be scaled before its gradient is taken.
        if not is_linear(head) or autocast_dtype(x):
            return chunked_next_token_losses(x, targets, head, vocab=head.vocab_size, z_loss=z_loss)
        x = self.read(x, head).flatten(0, 1)
        matrix = self.matrix(head) if matrix is None else matrix
        return self.losses(x, targets.flatten(), head, matrix, z_loss), (targets != IGNORE).sum()

    def matrix(self, head: Head) -> Matrix:
        """The matrix of a head, as this loss takes it; asked for before the pass that makes x."""
        return head.proj.weight

    def read(self, x: Hidden, head: Head) -> Float[Tensor, "batch seq width"]:
        """What the projection of a head reads."""
        return head.project(head.transform(x))

    def losses(
        self,
        x: Float[Tensor, "tokens width"],
        targets: Int[Tensor, " tokens"],
        head: Head,
        matrix: Matrix,
        z_loss: float,
    ) -> Losses:
        """Of what the head's projection reads."""
        shaping = shaping_of(head)._replace(z_loss=z_loss)
        weights = matrix, head.proj.bias
        learn = torch.is_grad_enabled()
        return cast(
            Tensor,
            _LinearHeadLoss.apply(  # pyright: ignore[reportUnknownMemberType]
                x, *weights, targets, shaping, learn, self
            ),
        )

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of two matrices, as `Multiply`, without gradients."""
        return product(a, b, bias)

    def differentiate(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, " tokens"],
        shaping: Shaping,
    ) -> Tensor:
        """The summed losses, cross-entropy and z-loss; the logits become their sum's gradient."""
        return loss_into_gradient(logits, targets, shaping, self.vocabulary)


def is_linear(head: Head) -> bool:
    """Whether a head is one product and what `Shaping` says, and no hook must see its parts."""
    parts = (head, head.proj, head.multiply, head.cap)
    return type(head.proj) is nn.Linear and not watched(*parts)


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


def widened(x: Tensor) -> Tensor:
    """In float32 at least; it may be the tensor given."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def default_max_logits(device: torch.device) -> int:
    """How many logits exist at once on a device if `max_logits` is None."""
    return MAX_LOGITS_ON_CPU if device.type == "cpu" else MAX_LOGITS


def rows_at_once(max_logits: int, vocab: int) -> int:
    """How many rows of logits are no more than so many numbers, and one at least."""
    return max(1, max_logits // vocab)


def parts_of(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of tensors, so many at a time.

    While a step is recorded, what lies between the third part and the last is left out: it would
    do what the third does, which is the first that meets a sum in float32.
    """
    begins = range(0, max(1, len(tensors[0])), size)
    if recording():
        begins = (*begins[:3], *begins[3:][-1:])
    return (tuple(tensor[begin : begin + size] for tensor in tensors) for begin in begins)


def blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of logits, few enough to be in float32 at once, with what belongs to them."""
    return parts_of(_rows_of_block(logits, logits.shape[1]), logits, *others)


def _rows_of_block(logits: Tensor, vocab: int) -> int:
    return rows_at_once(BLOCK.get(logits.device.type, LARGE_BLOCK), vocab)


class ProductGradients:
    """Gradients of `x Wᵀ + bias`, from the gradient of the product in parts of its rows.

    Args:
        rows: of x.
        wanted: of x, the weight and the bias; of what is not, nothing is computed.
        multiply: gives the product of two matrices.
    """

    def __init__(self, rows: int, wanted: Sequence[bool], multiply: Multiply) -> None:
        self._rows = rows
        self._wanted = wanted
        self._multiply = multiply
        self._done = 0
        self._of_x: Tensor | None = None
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, above: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take the gradient of the next rows of the product, whose rows of x these are."""
        for_x, for_weight, for_bias = self._wanted
        if for_x:
            self._add_of_x(self._multiply(above, weight, None))
        if for_weight:
            self._of_weight = _sum(self._of_weight, self._multiply(above.t(), x, None))
        if for_bias:
            wide = torch.promote_types(above.dtype, torch.float32)
            self._of_bias = _sum(self._of_bias, above.sum(dim=0, dtype=wide))

    def result(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, of the weight and of the bias, each in the type of its own."""
        return (
            self._of_x,
            None if self._of_weight is None else self._of_weight.to(weight.dtype),
            None if self._of_bias is None or bias is None else self._of_bias.to(bias.dtype),
        )

    def _add_of_x(self, part: Tensor) -> None:
        if len(part) == self._rows:
            self._of_x = part
            return
        if self._of_x is None:
            self._of_x = part.new_empty(self._rows, part.shape[1])
        self._of_x[self._done : self._done + len(part)] = part
        self._done += len(part)


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """In float32 at least from the second part on."""
    if total is None:
        return part
    total = widened(total)
    if total.dtype == part.dtype:
        return total.add_(part)
    for rows, more in blocks(total, part):  # of all that it casts, a CPU makes a copy
        rows.add_(more)
    return total


class _LinearHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Float[Tensor, "tokens width"],
        weight: Float[Tensor, "vocab width"],
        bias: Float[Tensor, " vocab"] | None,
        targets: Int[Tensor, " tokens"],
        shaping: Shaping,
        learn: bool,
        way: HeadLoss,
    ) -> Tensor:
        total = torch.zeros(2, device=x.device)
        wanted = [learn and one for one in ctx.needs_input_grad[:3]]
        gradients = ProductGradients(len(x), wanted, way.multiply)
        most = way.max_logits or default_max_logits(x.device)
        size = rows_at_once(most, way.vocabulary.most(len(weight)))
        for part, expected in parts_of(size, x, targets):
            logits = way.multiply(part, weight.t(), bias)
            total += way.differentiate(logits, expected, shaping)
            gradients.add(logits, part, weight)
            del logits
        ctx.gradients = gradients.result(weight, bias)
        return total

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
        return (*scaled, *[None] * 4)


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a b + bias` as `nn.Linear` computes it."""
    return F.linear(a, b.t(), bias)


def loss_into_gradient(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    shaping: Shaping,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """The summed losses, cross-entropy and z-loss; the logits become the gradient of their sum."""
    total = torch.zeros(2, device=logits.device)
    size = _rows_of_block(logits, vocabulary.most(logits.shape[1]))
    for block, wanted in parts_of(size, logits, targets):
        counted = (wanted != IGNORE)[:, None]
        here, expected = vocabulary.places(wanted)
        shaped = shape_logits(block, shaping)
        chosen = shaped.gather(1, expected).where(here, 0)
        largest = vocabulary.largest(shaped.amax(dim=1, keepdim=True))
        powers = (shaped - largest).exp_()
        of_rows = torch.cat((powers.sum(dim=1, keepdim=True), chosen), dim=1)
        of_rows = vocabulary.add(of_rows)
        sums, chosen = of_rows[:, :1], of_rows[:, 1:]
        normaliser = sums.log() + largest
        losses = torch.cat((normaliser - chosen, shaping.z_loss * normaliser.square()), dim=1)
        total += (losses * counted).sum(dim=0)
        gradient = powers.mul_(counted * (1 + 2 * shaping.z_loss * normaliser) / sums)
        gradient.scatter_add_(1, expected, -here.to(gradient.dtype))
        unshape_gradient(gradient, shaped, shaping)
        block.copy_(gradient)
    return total
