"""Write the computations of a decoding step as a program of native instructions."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from workhorse.execute.record import CannotTranslate
from workhorse.native.steps import Op
from workhorse.nn.positions.rope import RopeConfig

Number = TypeVar("Number", int, float)


class RotationKey(NamedTuple):
    """A RoPE rotation that a program uses, and the dtype in which it multiplies."""

    rope: RopeConfig
    head_dim: int
    dtype: torch.dtype


class CacheShape(NamedTuple):
    """Shape of the keys and values that a module stores for each token."""

    kv_heads: int
    width: int
    value_width: int


@dataclass(frozen=True)
class Program:
    """A decoding step as instructions: the arguments of `Steps.run` except tokens and cache."""

    instructions: Tensor
    numbers: Tensor
    registers: Tensor
    weights: tuple[Tensor, ...]
    rotations: tuple[RotationKey, ...]
    reaches: Tensor
    layers: tuple[CacheShape, ...]
    """For each entry of the cache, in the order of `Decoder.cache_stores`."""
    table_users: tuple[int, ...]
    """For each kind of block table, the index of a layer that uses it."""
    dtype: torch.dtype
    """Dtype of the model."""
    dtypes: tuple[torch.dtype, ...]
    """Dtype of each weight."""


class Register(NamedTuple):
    """A register of a program; it holds `width` elements per token, in fixed point if packed."""

    number: int
    width: int
    packed: bool = False


NOWHERE = Register(-1, 0)


@dataclass
class _Uses:
    """The registers that some instructions write and read."""

    written: set[Register] = field(default_factory=set[Register])
    read: set[Register] = field(default_factory=set[Register])

    def add(self, other: "_Uses") -> None:
        self.written |= other.written
        self.read |= other.read

    def conflicts(self, later: "_Uses") -> bool:
        """True if instructions that use the registers `later` must wait for these instructions."""
        return bool(self.written & (later.written | later.read) or self.read & later.written)


@dataclass
class _Stage:
    """A stage of a program: row-wise instructions that run together, or one other instruction."""

    rowwise: bool
    uses: _Uses = field(default_factory=_Uses)
    waits: bool = False
    instructions: list[list[int]] = field(default_factory=list[list[int]])
    """The instructions of the stage, without their wait and join flags."""


class Writer:
    """Writes a program, instruction by instruction.

    Released registers are used again. Consecutive row-wise instructions form a stage; every other
    instruction is a stage by itself. All threads wait for each other before a stage that conflicts
    with an earlier stage since the last wait. Two stages conflict if one of them writes a register
    that the other reads or writes.

    Args:
        vocab_size: width of the logits, the first register.
        dtype: dtype of the model.
        cached: the module of each cache entry, in the order of `Decoder.cache_stores`.
        translation: returns the function that writes a module's instructions, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        cached: Sequence[nn.Module] = (),
        translation: Callable[[nn.Module], Callable[..., Register] | None] = lambda _: None,
    ) -> None:
        self.dtype = dtype
        self._translation = translation
        self._cached = dict(enumerate(cached))
        self._layers: dict[int, CacheShape] = {}
        self._stages: list[_Stage] = []
        self._numbers: list[list[float]] = []
        self._registers = [Register(0, vocab_size)]
        self._free: list[Register] = []
        self._packed: dict[Register, Register] = {}
        self._weights: dict[int, Tensor] = {}
        self._rotations: dict[RotationKey, None] = {}
        self._table_users: dict[int | None, int] = {}
        self._reaches: dict[tuple[int, int], None] = {}
        self._before = _Uses()  # uses of the stages since the last wait, without the last stage

    def module(self, module: nn.Module, *inputs: Register) -> Register:
        """Write the instructions of a module; return the register of its result.

        Raises:
            CannotTranslate: the module has no instruction.
        """
        write = self._translation(module)
        if write is None:
            raise CannotTranslate(type(module).__name__)
        return write(self, module, *inputs)

    def modules(self, parts: Sequence[nn.Module], x: Register) -> Register:
        """Write modules that are applied one after another; release the registers between them."""
        for part in parts:
            before, x = x, self.module(part, x)
            self.release(*{before} - {x})
        return x

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
        """Write an instruction (`ops/decoding/step.h`); return the register of its result."""
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
        """Return a free register of this width; add a register if there is none."""
        for register in self._free:
            if (register.width, register.packed) == (width, packed):
                self._free.remove(register)
                return register
        self._registers.append(Register(len(self._registers), width, packed))
        return self._registers[-1]

    def release(self, *registers: Register) -> None:
        """Make registers and their packed copies available to later instructions."""
        for register in registers:
            self._free.append(register)
            if packed := self._packed.pop(register, None):
                self._free.append(packed)

    def packed(self, x: Register) -> Register:
        """Return the register with the fixed-point copy of x; write the instruction if needed."""
        if x not in self._packed:
            self._packed[x] = self.write(Op.PACK, self.reserve(x.width, packed=True), x)
        return self._packed[x]

    def weight(self, tensor: Tensor | None) -> int:
        """Return the index of a weight in the program, -1 for None; a new weight is added."""
        if tensor is None:
            return -1
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise CannotTranslate("a weight that is not contiguous on the CPU")
        self._weights.setdefault(id(tensor), tensor)
        return list(self._weights).index(id(tensor))

    def rotation(self, rotation: RotationKey) -> int:
        """Return the index of a rotation in the program; a new rotation is added."""
        return _number(rotation, self._rotations)

    def entry(self, module: nn.Module, reach: int | None, shape: CacheShape) -> tuple[int, int]:
        """Return the index of a module's cache entry, and of the block tables that it uses.

        Modules that see the same number of latest tokens (`reach`; None: all) share block tables.
        """
        free = (n for n, one in self._cached.items() if one is module and n not in self._layers)
        layer = next(free, None)
        if layer is None:
            raise CannotTranslate(f"{type(module).__name__} without a cache entry")
        self._layers[layer] = shape
        self._table_users.setdefault(reach, layer)
        return layer, list(self._table_users).index(reach)

    def reach(self, window: int | None, chunk: int | None) -> int:
        """Return the index of a layer's attention window and chunk size in the program."""
        return _number((window or 0, chunk or 0), self._reaches)

    def program(self) -> Program:
        """Return the program written so far; its last instruction computes the logits."""
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
            tuple(self._layers[layer] for layer in self._cached),
            tuple(self._table_users.values()),
            self.dtype,
            tuple(one.dtype for one in self._weights.values()),
        )


def _filled(given: Sequence[Number], count: int) -> list[Number | int]:
    return [*given, *[0] * (count - len(given))]


Key = TypeVar("Key", bound=Hashable)


def _number(one: Key, known: dict[Key, None]) -> int:
    """Return the index of `one` among the keys of `known`; a new key is added."""
    known.setdefault(one)
    return list(known).index(one)
