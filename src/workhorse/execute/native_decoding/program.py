"""What a decoder computes for one token, recorded, and the program of a step made from it.

So the wiring of a model is stated once, in `nn`: a program of its steps follows what its forward
pass does.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workhorse.native.steps import Op
from workhorse.nn import Decoder
from workhorse.nn.positions.rope import RopeConfig

ADDITIONS = (torch.add, Tensor.add, Tensor.__add__)
QUESTIONS = ("__get__", "dim", "is_floating_point", "numel", "size", "stride")
"""Names of functions that compute nothing of a tensor's elements."""


class CannotTranslate(Exception):
    """A decoder computes something that no instruction covers."""


class Computed(NamedTuple):
    """One computation: a module's, or a sum.

    Attributes:
        module: that computed it; None: it is the sum of the inputs.
        inputs: numbers of the values that it was given.
        output: number of the value that it gave; that of an input if it gave that back.
    """

    module: nn.Module | None
    inputs: tuple[int, ...]
    output: int


def record_modules(decoder: Decoder, known: Callable[[nn.Module], bool]) -> list[Computed]:
    """What modules that are known, and sums, compute of a token in turn; value 0 is the token.

    Args:
        decoder: to run once.
        known: whether a module is to be recorded; of any other its children are.

    Raises:
        CannotTranslate: anything else happens between token and logits.
    """
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
    recorder.number(token)
    with torch.no_grad(), ExitStack() as hooks:
        for module in decoder.modules():
            ours = recorder.enter, recorder.leave
            enter, leave = ours if known(module) else (recorder.begin, recorder.end)
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        hooks.enter_context(recorder)
        logits = decoder(token)
    if recorder.foreign is None and recorder.computed[-1].output != recorder.number(logits):
        recorder.foreign = "what follows the last module"
    if recorder.foreign is not None:
        raise CannotTranslate(recorder.foreign)
    return recorder.computed


class _Recorder(TorchFunctionMode):
    """Knows values by the tensors that hold them, and sees every function outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []
        self.foreign: str | None = None
        self._values: list[Tensor] = []  # alive, so that no two have one address
        self._inside = 0
        self._wirings: list[nn.Module] = []
        self._thread = threading.get_ident()  # others may call the modules meanwhile

    def number(self, value: Tensor) -> int:
        """The number of a value, a new one for a tensor that was not seen before."""
        for n, known in enumerate(self._values):
            if known is value:
                return n
        self._values.append(value)
        return len(self._values) - 1

    def knows(self, value: Tensor) -> bool:
        return any(known is value for known in self._values)

    def begin(self, module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """A module begins that is not recorded itself."""
        if threading.get_ident() == self._thread:
            self._wirings.append(module)

    def end(self, _module: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
        """It ends."""
        if threading.get_ident() == self._thread:
            self._wirings.pop()

    def enter(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self._inside += threading.get_ident() == self._thread

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._inside -= 1
        if not self._inside:
            self._add(module, (value for value in inputs if isinstance(value, Tensor)), output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", repr(func))
        if self._inside or name in QUESTIONS:
            return found
        values = (*args, *(kwargs or {}).values())
        given = [value for value in values if isinstance(value, Tensor)]
        if func in ADDITIONS and len(given) == len(args) == len(values):
            if all(map(self.knows, given)):
                self._add(None, given, found)
        elif any(self.knows(one) for one in given if one.is_floating_point()):
            self.refuse(name)
        return found

    def refuse(self, what: str) -> None:
        """Keep the first thing that cannot be translated: its module, or what it is."""
        wiring = type(self._wirings[-1]).__name__ if self._wirings else ""
        self.foreign = self.foreign or wiring or what

    def _add(self, module: nn.Module | None, inputs: Iterable[Tensor], output: Tensor) -> None:
        known = tuple(self.number(value) for value in inputs if self.knows(value))
        if not known:
            self.refuse(f"the input of {type(module).__name__}")
        self.computed.append(Computed(module, known, self.number(output)))


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
