"""Pipeline parallelism: consecutive layers on each of several ranks, and the order of passes.

A rank has the layers of its stage. For each micro-batch it receives the output of the previous
stage (1811.06965). The gradient is sent back the same way, as part of the backward pass. Only the
last stage has a loss.
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
from workhorse.nn.surgery import as_subclass, mixin_class, replace_modules
from workhorse.parallel.config import share_of
from workhorse.parallel.processes.group import Group, with_gradient


class Turn(NamedTuple):
    """One pass of a micro-batch through a stage."""

    micro_batch: int
    """Index of the micro-batch."""
    forward: bool
    """True for the micro-batch's forward pass, False for its backward pass."""


def one_forward_one_backward(micro_batches: int, stages: int = 1, stage: int = 0) -> Iterator[Turn]:
    """Yield the passes of a stage in the order of the 1F1B schedule (2104.04473 §2.2.1).

    At most `stages - stage` micro-batches are between their forward and their backward pass.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from (Turn(number, True) for number in range(ahead))
    for number in range(micro_batches - ahead):
        yield Turn(ahead + number, True)
        yield Turn(number, False)
    yield from (Turn(number, False) for number in range(micro_batches - ahead, micro_batches))


class Pipeline:
    """The pipeline group: ranks with the stages of a model, in order.

    Args:
        group: the ranks.

    Attributes:
        generating: True during generation, when every stage gets the logits.
        dtype: the dtype of tensors sent between stages.
    """

    dtype = torch.float32

    def __init__(self, group: Group) -> None:
        self.group = group
        self.generating = False
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def own(self, layers: int) -> range:
        """Return the indices of this stage's layers in a model of `layers` layers."""
        return share_of(layers, self.group.size, self.group.rank)

    def turns(self, micro_batches: int) -> Iterator[Turn]:
        """Yield this stage's passes in order, then wait until all its sends have completed."""
        yield from one_forward_one_backward(micro_batches, self.group.size, self.group.rank)
        while self._sent:
            self._sent.popleft()[0].wait()

    def send(self, x: Tensor, stage: int) -> None:
        """Send a tensor to another stage asynchronously."""
        x = x.detach().contiguous()
        if (work := self.group.send(x, stage)) is None:
            return
        self._sent.append((work, x))
        # In the order of `turns`, sends that old have completed, so this does not block.
        if len(self._sent) > 2 * self.group.size + 2:
            self._sent.popleft()[0].wait()

    def receive(self, like: Tensor, shape: Sequence[int], stage: int) -> Tensor:
        """Receive a tensor of shape `shape` from another stage, on the device of `like`."""
        into = torch.empty(shape, dtype=self.dtype, device=like.device)
        return self.group.receive(into, stage)


def keep_stage(decoder: Decoder, pipeline: Pipeline) -> None:
    """Remove the layers of all other stages from a decoder, in place; names stay the same.

    The first stage has the embedding; the last stage has the final norm and the head. An embedding
    table tied to the head is on both.
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
    """Make this rank's stage of a model communicate with the other stages, in place.

    Args:
        objective: a module that contains a decoder after `keep_stage`.
        pipeline: the pipeline group.
        dtype: the dtype of tensors sent between stages.
    """
    pipeline.dtype = dtype

    def choose(module: nn.Module) -> nn.Module:
        if isinstance(module, TokenLogprobs) and not pipeline.group.is_last:
            return as_subclass(module, mixin_class("Staged", _NoLogprobs, type(module)))
        if isinstance(module, Head):
            return as_subclass(
                module, mixin_class("Staged", _ToAll, type(module)), pipeline=pipeline
            )
        return module

    replace_modules(objective, choose)


class _FromBefore(nn.Module):
    """Replaces the embedding on all stages but the first: receives the previous stage's output."""

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
    """Replaces the final norm on all stages but the last: sends its input to the next stage.

    Its output and the gradient of its output are placeholders; only their shapes are used.
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
    """Zeros in place of log-probabilities, on all stages but the last.

    They connect the stage's output to the loss, so that autograd runs the stage's backward pass.
    """

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
    """Replaces the head on all stages but the last: receives its logits during generation."""

    def __init__(self, pipeline: Pipeline, vocab_size: int) -> None:
        super().__init__()
        self.pipeline, self.vocab_size = pipeline, vocab_size

    def forward(self, x: Hidden) -> Logits:
        logits = torch.empty(*x.shape[:-1], self.vocab_size, dtype=x.dtype, device=x.device)
        return self.pipeline.group.broadcast_last_(logits)


class _ToAll(Head):
    """The head of the last stage; in generation it broadcasts the logits to the other stages."""

    linear = True
    pipeline: Pipeline

    def forward(self, x: Hidden) -> Logits:
        logits = super().forward(x)
        return (
            self.pipeline.group.broadcast_last_(logits.contiguous())
            if self.pipeline.generating
            else logits
        )
