"""A step's program under construction: instructions, registers and barriers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from workhorse.execute.native_decoding.recorded import CannotTranslate
from workhorse.native.steps import Op
from workhorse.nn.positions.rope import RopeConfig

Number = TypeVar("Number", int, float)


class RotationKey(NamedTuple):
    """A rotation whose angles a program needs, in the dtype that it multiplies in."""

    rope: RopeConfig
    head_dim: int
    dtype: torch.dtype


class CacheShape(NamedTuple):
    """What a layer stores for a token."""

    kv_heads: int
    width: int
    value_width: int


@dataclass(frozen=True)
class Program:
    """What `Steps.run` takes besides the tokens and the cache; see there."""

    instructions: Tensor
    numbers: Tensor
    registers: Tensor
    weights: tuple[Tensor, ...]
    rotations: tuple[RotationKey, ...]
    reaches: Tensor
    layers: tuple[CacheShape, ...]
    table_users: tuple[int, ...]
    """A layer that uses each block table."""
    dtype: torch.dtype
    """Of the weights."""


class Register(NamedTuple):
    """A place for a value: `width` numbers for each token, packed or not."""

    number: int
    width: int
    packed: bool = False


NOWHERE = Register(-1, 0)


@dataclass
class _Uses:
    """Registers that instructions write and read."""

    written: set[Register] = field(default_factory=set[Register])
    read: set[Register] = field(default_factory=set[Register])

    def add(self, other: "_Uses") -> None:
        self.written |= other.written
        self.read |= other.read

    def conflicts(self, later: "_Uses") -> bool:
        """Whether instructions with `later` uses must wait for these."""
        return bool(self.written & (later.written | later.read) or self.read & later.written)


@dataclass
class _Stage:
    """Instructions that are done for one row after the other, or one that is not."""

    rowwise: bool
    uses: _Uses = field(default_factory=_Uses)
    waits: bool = False
    instructions: list[list[int]] = field(default_factory=list[list[int]])
    """Each without whether it waits or joins."""


class Writer:
    """Writes a program, instruction by instruction.

    A register that was released is used again. Row-wise instructions that follow one another form a
    stage; any other is one by itself. A stage waits if one since the last that did writes what it
    uses, or uses what it writes.

    Args:
        vocab_size: width of the logits, the first register.
        dtype: of the model.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.layers: list[CacheShape] = []
        self._stages: list[_Stage] = []
        self._numbers: list[list[float]] = []
        self._registers = [Register(0, vocab_size)]
        self._free: list[Register] = []
        self._packed: dict[Register, Register] = {}
        self._weights: dict[int, Tensor] = {}
        self._rotations: dict[RotationKey, None] = {}
        self._table_users: dict[int | None, int] = {}
        self._reaches: dict[tuple[int, int], None] = {}
        self._before = _Uses()  # by the stages before the last one, since one that waits

    def write(
        self,
        op: Op,
        to: Register,
        source: Register = NOWHERE,
        other: Register = NOWHERE,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        options: Sequence[int] = (),
        numbers: Sequence[float] = (),
    ) -> Register:
        """Write an instruction (`ops/decoding/step.h`); returns the register of its result."""
        if not (op.is_rowwise and self._stages and self._stages[-1].rowwise):
            if self._stages:
                self._before.add(self._stages[-1].uses)
            self._stages.append(_Stage(op.is_rowwise))
        stage = self._stages[-1]
        uses = _Uses({to}, {source, other} - {NOWHERE} - stage.uses.written)
        stage.uses.add(uses)
        if op is Op.LAST or self._before.conflicts(uses):
            stage.waits, self._before = True, _Uses()
        registers = [to.number, source.number, other.number]
        weights = [self.weight(weight), self.weight(bias)]
        stage.instructions.append([op, *registers, *weights, *_filled(options, 4)])
        self._numbers.append(_filled(numbers, 2))
        return to

    def reserve(self, width: int, *, packed: bool = False) -> Register:
        """A register that nobody uses."""
        for register in self._free:
            if (register.width, register.packed) == (width, packed):
                self._free.remove(register)
                return register
        self._registers.append(Register(len(self._registers), width, packed))
        return self._registers[-1]

    def release(self, *registers: Register) -> None:
        """Let registers be used again, and what was packed of them."""
        for register in registers:
            self._free.append(register)
            if packed := self._packed.pop(register, None):
                self._free.append(packed)

    def packed(self, x: Register) -> Register:
        """A value in fixed point, packed once for all that read it."""
        if x not in self._packed:
            self._packed[x] = self.write(Op.PACK, self.reserve(x.width, packed=True), x)
        return self._packed[x]

    def weight(self, tensor: Tensor | None) -> int:
        """The number of a weight, -1 for none."""
        if tensor is None:
            return -1
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise CannotTranslate("a weight that is not contiguous on the CPU")
        self._weights.setdefault(id(tensor), tensor)
        return list(self._weights).index(id(tensor))

    def rotation(self, rotation: RotationKey) -> int:
        """The number of a rotation."""
        return _number(rotation, self._rotations)

    def table(self, reach: int | None) -> int:
        """The number of the block tables of the layer that comes next."""
        self._table_users.setdefault(reach, len(self.layers))
        return list(self._table_users).index(reach)

    def reach(self, window: int | None, chunk: int | None) -> int:
        """The number of what the tokens of a layer see."""
        return _number((window or 0, chunk or 0), self._reaches)

    def program(self) -> Program:
        """What was written; the last instruction computes the logits."""
        self._stages[-1].instructions[-1][1] = 0
        code = [
            [op, stage.waits and n == 0, n > 0, *rest]
            for stage in self._stages
            for n, (op, *rest) in enumerate(stage.instructions)
        ]
        return Program(
            torch.tensor(code),
            torch.tensor(self._numbers, dtype=torch.float64),
            torch.tensor([[one.width, int(one.packed)] for one in self._registers]),
            tuple(self._weights.values()),
            tuple(self._rotations),
            torch.tensor(list(self._reaches)),
            tuple(self.layers),
            tuple(self._table_users.values()),
            self.dtype,
        )


def _filled(given: Sequence[Number], count: int) -> list[Number | int]:
    return [*given, *[0] * (count - len(given))]


Key = TypeVar("Key", bound=Hashable)


def _number(one: Key, known: dict[Key, None]) -> int:
    """Which of the known ones this is, a new one if need be."""
    known.setdefault(one)
    return list(known).index(one)
