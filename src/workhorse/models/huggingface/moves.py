"""A family's rules applied to one model: every tensor planned, checked, read and written."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workhorse.devices.destination import Destination
from workhorse.devices.names import dtype_name
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface.rules import Rule, Shape, Tensors
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.experts.router import ALWAYS_FLOAT32


class TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Move:
    """One rule applied to the tensors of one layer."""

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
    """The moves for all of our tensors, in our order.

    Args:
        rules: the family's; if several fit a name, the first whose tensors are `stored`, or else
            the first.
        shapes: of our parameters.
        config: of the decoder that has them.
        stored: the stored names, when reading.

    Raises:
        LookupError: no rule knows one of our names: a gap in the family's data.
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
    if not all(one in shapes for one in ours):  # another layout of this layer has other parts
        return None
    block = blocks[int(layer)] if layer else blocks[0]
    if rule.wiring not in (None, block.kind):
        return None
    theirs = [template.replace("{i}", layer) + end for template in rule.theirs]
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
    """Check that every tensor needed is there and fits; nothing is read.

    Raises:
        WorkhorseError: a tensor is missing or has another shape.
    """
    stored = source.shapes
    for move in moves:
        for name in move.theirs:
            if name not in stored:
                raise WorkhorseError(f"tensor {name!r} is missing; the checkpoint is not whole")
        theirs = [torch.empty(stored[name], device="meta") for name in move.theirs]
        wanted = [torch.empty(shapes[name], device="meta") for name in move.ours]
        expected = move.rule.put(wanted, [shapes[name] for name in move.ours], move.block)
        for name, found, fits in zip(move.theirs, theirs, expected, strict=True):
            if found.shape != fits.shape:
                raise WorkhorseError(
                    f"tensor {name!r} has shape {tuple(found.shape)} where the config makes "
                    f"{tuple(fits.shape)}; they are not of one model"
                )


@torch.no_grad()
def read_tensors(
    moves: Sequence[Move], parameters: Mapping[str, Destination], source: TensorSource
) -> None:
    """Copy tensors from the source into our parameters, one move at a time, the largest first.

    Raises:
        WorkhorseError: one holds integers or booleans, which are not weights.
    """

    def n_bytes(move: Move) -> int:
        return sum(parameters[name].nbytes for name in move.ours)

    # A tensor's mapped pages are in memory beside its copy until they are released. That makes the
    # peak if it is a large tensor's turn when almost all copies are there.
    for move in sorted(moves, key=n_bytes, reverse=True):
        shapes = [tuple(parameters[name].shape) for name in move.ours]
        stored = [source.read(name) for name in move.theirs]
        for name, tensor in zip(move.theirs, stored, strict=True):
            check_weight(name, tensor)
        taken = move.rule.take(stored, shapes, move.block)
        for name, tensor in zip(move.ours, taken, strict=True):
            parameters[name].copy_(tensor)


def check_weight(name: str, tensor: Tensor) -> None:
    """Refuse integers and booleans in place of weights.

    Raises:
        WorkhorseError: the tensor holds them.
    """
    if not tensor.is_floating_point():
        raise WorkhorseError(
            f"tensor {name!r} holds {dtype_name(tensor.dtype)}, which is no type of weights; "
            "fetch the model in a floating-point type"
        )


def written_tensors(
    moves: Sequence[Move], parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> list[tuple[str, Shape, torch.dtype, Callable[[], Tensor]]]:
    """The name, shape and dtype of every tensor to write, and a function that makes it.

    Args:
        moves: the plan.
        parameters: ours.
        dtype: of the written tensors, except those that are float32 in any model.
    """
    result: list[tuple[str, Shape, torch.dtype, Callable[[], Tensor]]] = []
    for move in moves:
        ours = [parameters[name].detach() for name in move.ours]
        shapes = [tuple(tensor.shape) for tensor in ours]
        on_meta = move.rule.put([tensor.to("meta") for tensor in ours], shapes, move.block)
        kept = torch.float32 if move.ours[0].endswith(ALWAYS_FLOAT32) else dtype
        for index, (name, made) in enumerate(zip(move.theirs, on_meta, strict=True)):
            result.append((name, tuple(made.shape), kept, _maker(move, ours, shapes, index)))
    return result


def _maker(move: Move, ours: Tensors, shapes: Sequence[Shape], index: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        return move.rule.put(ours, shapes, move.block)[index].contiguous()

    return make
