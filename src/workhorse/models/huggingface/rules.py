"""Names and layouts of tensors: which of theirs hold which of ours, as data that reads both ways.

    RULES = (
        same("embedding.tokens", "model.embed_tokens"),
        joined(("layers.{i}.attention.q_proj", …), "model.layers.{i}.self_attn.qkv_proj"),
    )

A template names a module or a parameter; what follows it in a parameter's name (`.weight`, `.bias`)
is the same on both sides. `{i}` is the layer. `{*}` on either side stands for every number that
occurs: one of our tensors may be a stack of many of theirs, or the other way round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from workhorse.nn.blocks import BlockConfig

Tensors = list[Tensor]
Shape = tuple[int, ...]
Layout = Callable[[Tensors, Sequence[Shape], BlockConfig], Tensors]
"""Tensors of one side to tensors of the other, given our shapes and the layer's config."""


@dataclass(frozen=True)
class Rule:
    """Some of our tensors, which of theirs hold them, and in what layout.

    Attributes:
        ours: templates of our names.
        theirs: templates of theirs.
        take: their tensors to ours.
        put: our tensors to theirs.
        wiring: the wiring of blocks that it applies to; None: any.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    take: Layout
    put: Layout
    wiring: str | None = None


def instead(*own: Rule, base: Sequence[Rule]) -> tuple[Rule, ...]:
    """A family's own rules, and those of `base` for tensors that they do not cover."""
    spoken_of = {template for rule in own for template in rule.ours}
    return (*own, *(rule for rule in base if spoken_of.isdisjoint(rule.ours)))


def same(ours: str, theirs: str, *, wiring: str | None = None) -> Rule:
    """The same tensor under another name, which it may have in blocks of one wiring only."""

    def unchanged(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return tensors

    return Rule((ours,), (theirs,), unchanged, unchanged, wiring)


def zeros(ours: str) -> Rule:
    """Zeros, if another rule's tensor is not stored; it must come after that rule."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del tensors, block
        return [torch.zeros(shape) for shape in shapes]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del tensors, shapes, block
        return []

    return Rule((ours,), (), take, put)


def reshaped(ours: str, theirs: str, shape: Callable[[Shape], Shape]) -> Rule:
    """The same numbers in the same order under another shape, which `shape` makes of ours."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del block
        return [tensors[0].reshape(shapes[0])]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del block
        return [tensors[0].reshape(shape(shapes[0]))]

    return Rule((ours,), (theirs,), take, put)


def transposed(ours: str, theirs: str) -> Rule:
    """Matrices stored as (in, out); stacks of them too. Vectors are the same."""

    def turn(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [tensor.mT if tensor.ndim > 1 else tensor for tensor in tensors]

    return Rule((ours,), (theirs,), turn, turn)


def concatenated(tensors: Tensors, dim: int) -> Tensor:
    """Like `torch.cat`, which for tensors on meta imports PyTorch's compiler: 1.5 seconds."""
    if not tensors[0].is_meta:
        return torch.cat(tensors, dim)
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(size)


def joined(ours: tuple[str, ...], theirs: str, *, dim: int = 0) -> Rule:
    """Several of ours, concatenated along one axis of theirs."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del block
        return list(torch.split(tensors[0], [shape[dim] for shape in shapes], dim))

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [concatenated(tensors, dim)]

    return Rule(ours, (theirs,), take, put)


def interleaved_by(
    ours: tuple[str, ...], theirs: str, groups: Callable[[BlockConfig], int]
) -> Rule:
    """Groups of rows of several of ours, interleaved: the first of each, then the second of each.

    With one group per head, the q, k and v of each head are adjacent.
    """

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        count = groups(block)
        grouped = cast(Tensor, tensors[0].unflatten(0, (count, -1)))
        parts = torch.split(grouped, [shape[0] // count for shape in shapes], 1)
        return [part.flatten(0, 1) for part in parts]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes
        count = groups(block)
        grouped = [cast(Tensor, tensor.unflatten(0, (count, -1))) for tensor in tensors]
        return [concatenated(grouped, 1).flatten(0, 1)]

    return Rule(ours, (theirs,), take, put)


def stacked(ours: str, theirs: str) -> Rule:
    """Ours is a stack of theirs, whose names are numbered by `{*}`."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [concatenated([tensor[None] for tensor in tensors], 0)]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return list(tensors[0].unbind())

    return Rule((ours,), (theirs,), take, put)


def unstacked(ours: str, theirs: str) -> Rule:
    """Theirs is a stack of ours, whose names are numbered by `{*}`."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return list(tensors[0].unbind())

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [concatenated([tensor[None] for tensor in tensors], 0)]

    return Rule((ours,), (theirs,), take, put)


def then_transposed(rule: Rule) -> Rule:
    """The same rule for matrices stored as (in, out)."""

    def turned(tensors: Tensors) -> Tensors:
        return [tensor.mT if tensor.ndim > 1 else tensor for tensor in tensors]

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        return rule.take(turned(tensors), shapes, block)

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        return turned(rule.put(tensors, shapes, block))

    return Rule(rule.ours, rule.theirs, take, put)
