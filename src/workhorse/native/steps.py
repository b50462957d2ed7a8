"""A whole decoding step as one operator; see `ops/decoding/step.h`."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from workhorse.native import build
from workhorse.native.blocks import ActivationName


class Op(IntEnum):
    """The instructions of a step program; `ops/decoding/step.h` describes each of them."""

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
    CONVOLVE = 13
    CAP = 14
    CLIP = 15
    MULTIPLY = 16
    GROW = 17
    CLAMPED_SWIGLU = 18
    WAVE = 19
    XIELU = 20
    SCORE = 21
    CHOOSE = 22
    ORDER = 23
    SEND = 24
    EXPERT = 25
    GATHER = 26

    @property
    def is_rowwise(self) -> bool:
        """True if each output row depends only on the same row of the inputs."""
        return self not in _TOGETHER


_TOGETHER = {
    *(Op.LINEAR, Op.PACKED_LINEAR, Op.ATTEND, Op.LAST, Op.CONVOLVE),
    *(Op.SCORE, Op.ORDER, Op.SEND, Op.EXPERT, Op.GATHER),
}


class NormFlag(IntFlag):
    """Options of the instruction NORM, combined by bitwise or."""

    CENTRED = 1
    ROUNDED_NORMAL = 2
    ROUNDED_GAIN = 4


class RotationFlag(IntFlag):
    """Options of the instruction ROTATE (RoPE), combined by bitwise or."""

    INTERLEAVED = 1
    IN_FLOAT32 = 2


class RouterFlag(IntFlag):
    """Options of the instruction CHOOSE, combined by bitwise or."""

    SIGMOID = 1
    NORMALISED = 2
    RANKS_SCORES = 4
    TOP_TWO = 8
    SPARSE = 16


CHOICE_BYTES = 12
"""Size of a choice of an expert in a register: its index, weight and place."""


ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)
"""Activation names; the index of each is its code in a program."""


class KeptWeights:
    """Weights registered with the step operator, so that they are not passed at every step.

    Instructions refer to them by index. Weights may change in place, and may get other storage.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.number: int = torch.ops.workhorse.keep_weights.default(list(weights))
        drop = torch.ops.workhorse.drop_weights.default
        # PyTorch may be unloaded at interpreter exit, so the finalizer must not run then.
        weakref.finalize(self, drop, self.number).atexit = False


@dataclass(frozen=True)
class Steps:
    """The operator that runs a step program; an instance exists only if it can be called."""

    def __reduce__(self) -> build.Reduced:
        return build.loading(load)

    def keep(self, weights: Sequence[Tensor]) -> KeptWeights:
        """Register weights for `run`; they must be contiguous and on the CPU."""
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
        """Run a decoding step: store the keys and values of all new tokens, and compute logits.

        Args:
            program: the instructions. Each has an op, a wait flag, a flag that joins it to the
                instruction before it, registers, weights and options; see `ops/decoding/step.h`.
            numbers: two floating-point options of each instruction.
            registers: width and packed flag of each register; the first register is the logits.
            weights: the weights that instructions refer to by index.
            angles: cosines and sines of each rotation in turn, (positions, pairs).
            tokens: the new tokens of each sequence, concatenated.
            counts: number of new tokens of each sequence.
            lengths: number of tokens of each sequence in the cache.
            tables: block tables of the sequences, including the blocks of the new tokens. There is
                one tensor for each set of layers that share block tables.
            keys: the cached keys of each layer, bfloat16 or float32 like the model.
            values: the cached values of each layer, of the same dtype.
            reaches: attention window and chunk size of each kind of layer, 0 for none.
            few: largest number of rows for which linear layers are dot products, so that a row's
                result does not depend on the batch (bitwise). Larger batches use gemms.
            wanted: indices of the tokens whose next-token logits are returned.
            vocab: size of the vocabulary.
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
    """Load the operator for whole decode steps, compiled first if necessary; see `decoding.load`.

    Raises:
        build.Unavailable: it cannot be called; the message is the reason in one line.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        raise build.Unavailable("threads that wait for each other need PyTorch built with OpenMP")
    build.provide("steps", {"decode_step": _logits_shape}, wait=wait)
    return Steps()


def _logits_shape(*arguments: Any) -> Tensor:
    """Shape of the result of `decode_step`; see `Steps.run`."""
    keys, (wanted, vocab) = arguments[9], arguments[-2:]
    return keys[0].new_empty(wanted.shape[0], vocab)
