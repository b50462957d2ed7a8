"""A whole decoding step as one operator; see `ops/decoding/step.h`."""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from workhorse.native import build
from workhorse.native.blocks import ActivationName


class Op(IntEnum):
    """The instructions of a program, as `ops/decoding/step.h` describes them."""

    EMBED = 0
    EMBED_POSITION = 1
    SCALE = 2
    ADD = 3
    NORM = 4
    ACTIVATE = 5
    LINEAR = 6
    PACK = 7
    PACKED_LINEAR = 8
    ROTATE = 9
    STORE = 10
    ATTEND = 11
    LAST = 12

    @property
    def is_rowwise(self) -> bool:
        """Whether each row is computed from the same row of what is read."""
        return self not in (Op.LINEAR, Op.PACKED_LINEAR, Op.ATTEND, Op.LAST)


class NormFlag(IntFlag):
    """How a norm computes."""

    CENTRED = 1
    ROUNDED_NORMAL = 2
    ROUNDED_GAIN = 4


class RotationFlag(IntFlag):
    """How queries and keys are rotated."""

    INTERLEAVED = 1
    IN_FLOAT32 = 2


ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)
"""In the order of their numbers."""


class KeptWeights:
    """Weights that instructions name by number, handed to the operator once for all steps.

    They may change in place, and be given other storage.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.number: int = torch.ops.workhorse.keep_weights.default(list(weights))
        drop = torch.ops.workhorse.drop_weights.default
        weakref.finalize(self, drop, self.number).atexit = False  # PyTorch may be gone by then


@dataclass(frozen=True)
class Steps:
    """The operator; an instance exists only if it can be called."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def keep(self, weights: Sequence[Tensor]) -> KeptWeights:
        """What `run` takes for weights, contiguous on the CPU."""
        return KeptWeights(weights)

    def run(
        self,
        program: Int64[Tensor, "instructions 12"],
        numbers: Float64[Tensor, "instructions 2"],
        registers: Int64[Tensor, "registers 2"],
        weights: KeptWeights,
        *,
        angles: Sequence[Tensor],
        tokens: Int64[Tensor, " tokens"],
        counts: Int64[Tensor, " batch"],
        lengths: Int64[Tensor, " batch"],
        tables: Sequence[Int64[Tensor, "batch blocks_of_a_sequence"]],
        keys: Sequence[Float[Tensor, "kv_heads blocks block width"]],
        values: Sequence[Float[Tensor, "kv_heads blocks block width"]],
        reaches: Int64[Tensor, "reaches 2"],
        few: int,
        wanted: Int64[Tensor, " wanted"],
        vocab: int,
    ) -> Float[Tensor, "wanted vocab"]:
        """The logits after some tokens; the keys and values of all tokens are stored.

        Args:
            program: the instructions, each with its op, whether it waits, whether it joins the one
                before it, registers, weights and options.
            numbers: two for each instruction.
            registers: the width of each, and whether it is packed; the first one is the logits.
            weights: what instructions name by number.
            angles: cosines and sines of each rotation, one after the other, (positions, pairs).
            tokens: the new tokens of each sequence, one sequence after the other.
            counts: number of new tokens of each sequence.
            lengths: number of tokens of each sequence in the cache.
            tables: blocks of each sequence, for each reach of the cache, with room for the tokens.
            keys: of each layer, bfloat16 or float32 like the model.
            values: likewise.
            reaches: a window and a chunk for each reach of a layer, 0 where there is none.
            few: rows up to which linear layers are dot products, and no row changes another's bits;
                for more they are gemms.
            wanted: indices of the tokens to compute the logits after.
            vocab: number of logits of a token.
        """
        return torch.ops.workhorse.decode_step.default(
            program,
            numbers,
            registers,
            weights.number,
            list(angles),
            tokens,
            counts,
            lengths,
            list(tables),
            list(keys),
            list(values),
            reaches,
            few,
            wanted,
            vocab,
        )


def load(*, wait: bool) -> Steps:
    """The operator, compiled first if it never was on this machine; see `decoding.load`.

    Raises:
        build.Unavailable: why it cannot be called, in one line.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        raise build.Unavailable("threads that wait for each other need PyTorch built with OpenMP")
    return _load(build.ensure("steps", wait=wait))


@functools.cache
def _load(library: Path) -> Steps:
    build.load(library)
    torch.library.register_fake("workhorse::decode_step", _logits_shape)
    return Steps()


def _logits_shape(*arguments: Any) -> Tensor:
    """Of `decode_step`; see `Steps.run`."""
    keys, (wanted, vocab) = arguments[9], arguments[-2:]
    return keys[0].new_empty(wanted.shape[0], vocab)
