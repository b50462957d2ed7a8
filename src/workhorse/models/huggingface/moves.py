"""Rules that map tensors of a foreign checkpoint to our parameters, in both directions.

    RULES = (
        same("embedding.tokens", "model.embed_tokens"),
        joined(("layers.{i}.attention.q_proj", …), "model.layers.{i}.self_attn.qkv_proj"),
    )

"Ours" are the parameters of our decoder; "theirs" are the tensors of the foreign checkpoint. A
template names a module or a parameter; the rest of a parameter's name (`.weight`, `.bias`) is the
same on both sides. `{i}` is the layer index. `{*}` on either side stands for every index that
occurs: one of our tensors may be a stack of several of theirs, or the reverse.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from workhorse.devices.names import dtype_name
from workhorse.devices.transfer import Destination
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.experts.router import ALWAYS_FLOAT32

Tensors = list[Tensor]
Shape = tuple[int, ...]
Layout = Callable[[Tensors, Sequence[Shape], BlockConfig], Tensors]
"""Function that converts our tensors to tensors of a foreign checkpoint, or back.

Its arguments are the tensors, the shapes of our tensors and the layer's config.
"""


@dataclass(frozen=True)
class Rule:
    """A mapping between some of our tensors and tensors of a foreign checkpoint.

    Attributes:
        ours: name templates of our tensors.
        theirs: name templates of the checkpoint's tensors.
        take: function that converts the checkpoint's tensors to ours.
        put: function that converts our tensors to the checkpoint's.
        wiring: kind of block that the rule applies to; None for any kind.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    take: Layout
    put: Layout
    wiring: str | None = None


def instead(*own: Rule, base: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules `own`, then the rules of `base` for tensors without a rule in `own`."""
    spoken_of = {template for rule in own for template in rule.ours}
    return (*own, *(rule for rule in base if spoken_of.isdisjoint(rule.ours)))


def same(ours: str, theirs: str, *, wiring: str | None = None) -> Rule:
    """Rule for a tensor that only has another name; `wiring` limits it to one kind of block."""

    def unchanged(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return tensors

    return Rule((ours,), (theirs,), unchanged, unchanged, wiring)


def zeros(ours: str) -> Rule:
    """Rule that fills a tensor with zeros if no earlier rule finds it in the checkpoint."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del tensors, block
        return [torch.zeros(shape) for shape in shapes]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del tensors, shapes, block
        return []

    return Rule((ours,), (), take, put)


def reshaped(ours: str, theirs: str, shape: Callable[[Shape], Shape]) -> Rule:
    """Rule for a tensor that is stored with another shape, which `shape` computes from ours."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del block
        return [tensors[0].reshape(shapes[0])]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del block
        return [tensors[0].reshape(shape(shapes[0]))]

    return Rule((ours,), (theirs,), take, put)


def transposed(ours: str, theirs: str) -> Rule:
    """Rule for a tensor with matrices that are stored as (in, out), not (out, in).

    Vectors are unchanged.
    """

    def turn(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [tensor.mT if tensor.ndim > 1 else tensor for tensor in tensors]

    return Rule((ours,), (theirs,), turn, turn)


def concatenated(tensors: Tensors, dim: int) -> Tensor:
    """Like `torch.cat`, but without importing PyTorch's compiler (1.5 s) for meta tensors."""
    if not tensors[0].is_meta:
        return torch.cat(tensors, dim)
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(size)


def joined(ours: tuple[str, ...], theirs: str, *, dim: int = 0) -> Rule:
    """Rule for several of our tensors that are stored as one, concatenated along `dim`."""

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
    """Rule for several of our tensors that are stored as one, with interleaved groups of rows.

    The first group of each tensor comes first, then the second group of each, and so on. With one
    group per head, the q, k and v of each head are adjacent.
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
    """Rule for one of our tensors that stacks several stored tensors, numbered by `{*}`."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [concatenated([tensor[None] for tensor in tensors], 0)]

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return list(tensors[0].unbind())

    return Rule((ours,), (theirs,), take, put)


def unstacked(ours: str, theirs: str) -> Rule:
    """Rule for one stored tensor that stacks several of ours, numbered by `{*}`."""

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return list(tensors[0].unbind())

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        del shapes, block
        return [concatenated([tensor[None] for tensor in tensors], 0)]

    return Rule((ours,), (theirs,), take, put)


def then_transposed(rule: Rule) -> Rule:
    """Change a rule for checkpoints that store matrices as (in, out), not (out, in)."""

    def turned(tensors: Tensors) -> Tensors:
        return [tensor.mT if tensor.ndim > 1 else tensor for tensor in tensors]

    def take(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        return rule.take(turned(tensors), shapes, block)

    def put(tensors: Tensors, shapes: Sequence[Shape], block: BlockConfig) -> Tensors:
        return turned(rule.put(tensors, shapes, block))

    return Rule(rule.ours, rule.theirs, take, put)


class TensorSource(Protocol):
    """A source of stored tensors, which are read one at a time by name."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Move:
    """A rule with the names of actual tensors: it converts tensors `theirs` to `ours`, or back."""

    rule: Rule
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    block: BlockConfig


def plan(
    rules: Sequence[Rule],
    shapes: Mapping[str, Shape],
    config: DecoderConfig,
    stored: Iterable[str] | None = None,
) -> list[Move]:
    """Choose a rule for each of our tensors; return the moves in the order of our parameters.

    Args:
        rules: rules of the family. If several match a name, the first one is used that finds all
            its tensors in `stored`, or else the first one.
        shapes: shapes of our parameters.
        config: config of our decoder.
        stored: names of the stored tensors when reading; None when writing.

    Raises:
        LookupError: no rule matches one of our names; the family's rules are incomplete.
    """
    blocks = [config.blocks[name] for name in config.layer_names()]
    there = None if stored is None else set(stored)
    moves: list[Move] = []
    done: set[str] = set()
    for name in shapes:
        if name in done:
            continue
        fits = [move for rule in rules if (move := _fit(rule, name, shapes, blocks))]
        if not fits:
            raise LookupError(f"no rule for {name!r}")
        whole = (move for move in fits if there is not None and there.issuperset(move.theirs))
        moves.append(next(whole, fits[0]))
        done.update(moves[-1].ours)
    return moves


def _fit(
    rule: Rule, name: str, shapes: Mapping[str, Shape], blocks: Sequence[BlockConfig]
) -> Move | None:
    for template in rule.ours:
        pattern = re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{\*\}", r"\d+")
        if found := re.fullmatch(pattern + r"(?P<end>(\.\w+)?)", name):
            layer, end = found.groupdict().get("i", ""), found["end"]
            break
    else:
        return None
    ours = [template.replace("{i}", layer) + end for template in rule.ours]
    many = "{*}" in ours[0]
    if many:
        ours = [numbered for one in ours for numbered in _numbered(one, shapes)]
    if not all(one in shapes for one in ours):  # the layer lacks a tensor of the rule
        return None
    block = blocks[int(layer)] if layer else blocks[0]
    if rule.wiring not in (None, block.kind):
        return None
    theirs = [template.replace("{i}", layer) + end for template in rule.theirs]
    # If our template has no `{*}`, each of their tensors is a slice of ours along dimension 0.
    count = len(ours) // len(rule.ours) if many else shapes[ours[0]][0]
    theirs = [
        one.replace("{*}", str(n)) for one in theirs for n in range(count if "{*}" in one else 1)
    ]
    return Move(rule, tuple(ours), tuple(theirs), block)


def _numbered(template: str, shapes: Mapping[str, Shape]) -> list[str]:
    names: list[str] = []
    while (name := template.replace("{*}", str(len(names)))) in shapes:
        names.append(name)
    return names


def check(moves: Sequence[Move], shapes: Mapping[str, Shape], source: TensorSource) -> None:
    """Check that every tensor of the moves is stored with the right shape. Reads no tensor.

    Raises:
        WorkhorseError: a tensor is missing or has another shape.
    """
    stored = source.shapes
    for move in moves:
        for name in move.theirs:
            if name not in stored:
                raise WorkhorseError(f"tensor {name!r} is missing; the checkpoint is incomplete")
        theirs = [torch.empty(stored[name], device="meta") for name in move.theirs]
        wanted = [torch.empty(shapes[name], device="meta") for name in move.ours]
        expected = move.rule.put(wanted, [shapes[name] for name in move.ours], move.block)
        for name, found, fits in zip(move.theirs, theirs, expected, strict=True):
            if found.shape != fits.shape:
                raise WorkhorseError(
                    f"tensor {name!r} has shape {tuple(found.shape)}, but the config needs "
                    f"{tuple(fits.shape)}; use files of the same model"
                )


@torch.no_grad()
def read_tensors(
    moves: Sequence[Move], parameters: Mapping[str, Destination], source: TensorSource
) -> None:
    """Copy tensors from the source into our parameters, one move at a time, the largest first.

    Raises:
        WorkhorseError: a tensor holds integers or booleans, which are not weights.
    """

    def n_bytes(move: Move) -> int:
        return sum(parameters[name].nbytes for name in move.ours)

    # The mapped pages of a tensor stay in memory beside its copy until they are released. Copying a
    # large tensor last, when almost all copies exist, would raise the memory peak.
    for move in sorted(moves, key=n_bytes, reverse=True):
        shapes = [tuple(parameters[name].shape) for name in move.ours]
        stored = [source.read(name) for name in move.theirs]
        for name, tensor in zip(move.theirs, stored, strict=True):
            check_weight(name, tensor)
        taken = move.rule.take(stored, shapes, move.block)
        for name, tensor in zip(move.ours, taken, strict=True):
            parameters[name].copy_(tensor)


def check_weight(name: str, tensor: Tensor) -> None:
    """Check that a weight is not stored as integers or booleans.

    Raises:
        WorkhorseError: the tensor does not have a floating-point dtype.
    """
    if not tensor.is_floating_point():
        raise WorkhorseError(
            f"tensor {name!r} holds {dtype_name(tensor.dtype)}, but weights need a float dtype; "
            "download the model in a floating-point dtype"
        )


def written_tensors(
    moves: Sequence[Move],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    shapes: Mapping[str, Shape],
) -> list[tuple[str, Shape, torch.dtype, Callable[[], Tensor]]]:
    """List the tensors to write: name, shape, dtype, and a function that computes the tensor.

    Args:
        moves: result of `plan`.
        parameters: our parameters by name; each is read when a tensor is computed from it.
        dtype: dtype of the written tensors, except those that are always float32.
        shapes: the shapes of the parameters.
    """
    result: list[tuple[str, Shape, torch.dtype, Callable[[], Tensor]]] = []
    for move in moves:
        sizes = [shapes[name] for name in move.ours]
        empty = [torch.empty(size, device="meta") for size in sizes]
        on_meta = move.rule.put(empty, sizes, move.block)
        kept = torch.float32 if move.ours[0].endswith(ALWAYS_FLOAT32) else dtype
        for index, (name, made) in enumerate(zip(move.theirs, on_meta, strict=True)):
            result.append((name, tuple(made.shape), kept, _maker(move, parameters, sizes, index)))
    return result


def _maker(
    move: Move, parameters: Mapping[str, Tensor], shapes: Sequence[Shape], index: int
) -> Callable[[], Tensor]:
    def make() -> Tensor:
        ours = [parameters[name].detach() for name in move.ours]
        return move.rule.put(ours, shapes, move.block)[index].contiguous()

    return make
