"""Pipeline parallelism: consecutive layers on each of several ranks, and the order of passes.

A process has the layers of its stage, and takes in what the stage before makes of each micro-batch
(1811.06965). The gradient comes back the same way, as part of the backward pass. The last stage
alone has a loss.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from workhorse.nn import Decoder, TokenLogprobs
from workhorse.nn.embedding import Head
from workhorse.nn.logprobs import Matrix, Terms
from workhorse.nn.products import wide
from workhorse.nn.shapes import Hidden, Logits, Positions, Tokens
from workhorse.parallel.config import share_of
from workhorse.parallel.processes.group import Group, with_gradient
from workhorse.transforms.record import become, combined, replace_modules


class Turn(NamedTuple):
    """What a process does next."""

    micro_batch: int
    forward: bool
    """Or else its backward pass."""


def one_forward_one_backward(micro_batches: int, stages: int = 1, stage: int = 0) -> Iterator[Turn]:
    """The passes of a stage, of each micro-batch one in each direction (2104.04473 §2.2.1).

    Every stage has at most as many micro-batches between their passes as stages follow it, and one.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from (Turn(number, True) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield Turn(ahead + number, True)
        yield Turn(number, False)
    yield from (Turn(number, False) for number in range(micro_batches - ahead, micro_batches))


class Pipeline:
    """The processes that have the stages of a model, in their order.

    Args:
        group: they alone.

    Attributes:
        grows: whether passes are of a text that grows: of all its tokens, with logits for all.
        dtype: of what goes from one stage to the next.
    """

    dtype = torch.float32

    def __init__(self, group: Group) -> None:
        self.group = group
        self.grows = False
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def own(self, layers: int) -> range:
        """Which of so many layers this process has."""
        return share_of(layers, self.group.size, self.group.rank)

    def turns(self, micro_batches: int) -> Iterator[Turn]:
        """The order of this stage's passes, after which all that it sent has arrived."""
        yield from one_forward_one_backward(micro_batches, self.group.size, self.group.rank)
        while self._sent:
            self._sent.popleft()[0].wait()

    def send(self, x: Tensor, stage: int) -> None:
        """Send a tensor to another stage, without waiting for it to arrive."""
        x = x.detach().contiguous()
        if (work := self.group.send(x, stage)) is None:
            return
        self._sent.append((work, x))
        if len(self._sent) > 2 * self.group.size + 2:  # in `turns` it has arrived
            self._sent.popleft()[0].wait()

    def receive(self, like: Tensor, shape: Sequence[int], stage: int) -> Tensor:
        """Wait for what another stage sends, of that shape, on the device of a tensor."""
        into = torch.empty(shape, dtype=self.dtype, device=like.device)
        return self.group.receive(into, stage)


def keep_stage(decoder: Decoder, pipeline: Pipeline) -> None:
    """Leave a decoder the layers of a stage, under their names, in place.

    The first stage has the embedding, the last the norm and the head; a table that is tied to it is
    on both.
    """
    own, config = pipeline.own(len(decoder.layers)), decoder.config
    for name, _ in list(decoder.layers.named_children()):
        if int(name) not in own:
            delattr(decoder.layers, name)
    if not pipeline.group.is_first:
        tied = decoder.embedding.tokens if pipeline.group.is_last and config.head.tied else None
        decoder.set_submodule("embedding", _FromBefore(pipeline, config.d_model, tied))
    if not pipeline.group.is_last:
        decoder.set_submodule("final_norm", _ToNext(pipeline))
        decoder.set_submodule("head", _FromLast(pipeline, config.vocab_size))
        decoder.config = config.replace(head=config.head.replace(tied=False).to_dict())


def divide_stages(objective: nn.Module, pipeline: Pipeline, dtype: torch.dtype) -> None:
    """Let the stage of a model that a process has compute together with the others, in place.

    Args:
        objective: holds a decoder of which `keep_stage` left a stage.
        pipeline: has the other stages.
        dtype: of what goes from one to the next.
    """
    pipeline.dtype = dtype

    def choose(module: nn.Module) -> nn.Module:
        if isinstance(module, TokenLogprobs) and not pipeline.group.is_last:
            return become(module, combined("Staged", _NoLogprobs, type(module)))
        if isinstance(module, Head):
            return become(module, combined("Staged", _ToAll, type(module)), pipeline=pipeline)
        return module

    replace_modules(objective, choose)


class _FromBefore(nn.Module):
    """Replaces the embedding: receives the previous stage's output."""

    def __init__(self, pipeline: Pipeline, d_model: int, tokens: nn.Module | None) -> None:
        super().__init__()
        self.pipeline, self.d_model = pipeline, d_model
        self.tokens = tokens

    def forward(self, tokens: Tokens, positions: Positions) -> Hidden:
        shape = len(tokens), positions.shape[1], self.d_model
        before = self.pipeline.group.rank - 1

        def receive(anchor: Tensor) -> Tensor:
            return self.pipeline.receive(anchor, shape, before)

        def give_back(gradient: Tensor) -> Tensor:
            self.pipeline.send(gradient, before)
            return gradient.new_zeros((), dtype=torch.float32)

        anchor = torch.zeros((), device=tokens.device, requires_grad=True)
        return with_gradient(receive, give_back, anchor)


class _ToNext(nn.Module):
    """Replaces the final norm: sends the layers' output to the next stage.

    Its own output, and the gradient that it gets for that, carry no values.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.pipeline = pipeline

    def forward(self, x: Hidden) -> Hidden:
        after = self.pipeline.group.rank + 1

        def give(x: Tensor) -> Tensor:
            self.pipeline.send(x, after)
            return x.new_zeros(()).expand(x.shape)

        def receive(above: Tensor) -> Tensor:
            return self.pipeline.receive(above, above.shape, after)

        return with_gradient(give, receive, x)


class _NoLogprobs(TokenLogprobs):
    """Zeros, by which autograd asks for the gradient of this stage's layers."""

    def fuses(self, *_: Any) -> bool:
        return False

    def matrix(self, head: Head) -> Matrix:
        return torch.empty(0, 0)

    def terms(
        self, x: Hidden, targets: Int[Tensor, " tokens"], head: Head, matrix: Matrix | None = None
    ) -> Terms:
        return with_gradient(
            lambda x: x.new_zeros(targets.numel(), 3, dtype=wide(x.dtype)),
            lambda above: above.new_zeros((), dtype=x.dtype).expand(x.shape),
            x,
        )


class _FromLast(nn.Module):
    """In place of the head, the logits of a text, from the last stage."""

    def __init__(self, pipeline: Pipeline, vocab_size: int) -> None:
        super().__init__()
        self.pipeline, self.vocab_size = pipeline, vocab_size

    def forward(self, x: Hidden) -> Logits:
        logits = torch.empty(*x.shape[:-1], self.vocab_size, dtype=x.dtype, device=x.device)
        return self.pipeline.group.broadcast_last_(logits)


class _ToAll(Head):
    """Gives the other stages the logits of a text."""

    linear = True
    pipeline: Pipeline

    def forward(self, x: Hidden) -> Logits:
        logits = super().forward(x)
        return (
            self.pipeline.group.broadcast_last_(logits.contiguous())
            if self.pipeline.grows
            else logits
        )
