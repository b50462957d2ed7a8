"""Record a decoder's computations for one token, and write them as a step program.

The program follows the recorded forward pass. How the modules of a model are connected is therefore
defined only once, in `nn`.
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
"""Names of functions that read only the metadata of a tensor."""


class CannotTranslate(Exception):
    """A decoder computes something for which there is no instruction."""


class Computed(NamedTuple):
    """A recorded computation: the forward pass of a module, or the sum of two values.

    Attributes:
        module: the module that computed it; None for the sum of the inputs.
        inputs: ids of the input values.
        output: id of the output value; the id of an input if the module returned that input.
    """

    module: nn.Module | None
    inputs: tuple[int, ...]
    output: int


def record_modules(decoder: Decoder, known: Callable[[nn.Module], bool]) -> list[Computed]:
    """Run a decoder on one token, and record the computations of known modules and sums in order.

    The token has the id 0.

    Args:
        decoder: the decoder.
        known: returns True if a module is recorded as one computation; otherwise its children are
            recorded.

    Raises:
        CannotTranslate: the decoder computes something other than known modules and sums.
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
        recorder.foreign = "operations after the last module"
    if recorder.foreign is not None:
        raise CannotTranslate(recorder.foreign)
    return recorder.computed


class _Recorder(TorchFunctionMode):
    """Records computations: hooks record known modules, and this mode records other functions.

    Each tensor has an id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[Computed] = []
        self.foreign: str | None = None
        self._values: list[Tensor] = []  # kept alive, so that ids of live tensors stay unique
        self._inside = 0
        self._wirings: list[nn.Module] = []
        self._thread = threading.get_ident()  # other threads may call the modules meanwhile

    def number(self, value: Tensor) -> int:
        """Return the id of a tensor; a new tensor gets a new id."""
        for n, known in enumerate(self._values):
            if known is value:
                return n
        self._values.append(value)
        return len(self._values) - 1

    def knows(self, value: Tensor) -> bool:
        return any(known is value for known in self._values)

    def begin(self, module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """Hook before the forward pass of a module that is not recorded as one computation."""
        if threading.get_ident() == self._thread:
            self._wirings.append(module)

    def end(self, _module: nn.Module, _inputs: tuple[Any, ...], _output: Any) -> None:
        """Hook after the forward pass of a module that is not recorded as one computation."""
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
        # A property such as `data` is a view, through which the tensor can be changed.
        if self._inside or (name in QUESTIONS and not isinstance(found, Tensor)):
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
        """Note a computation that cannot be translated; only the first one is kept.

        Args:
            what: its name. If a module contains it, the module's class is noted instead.
        """
        wiring = type(self._wirings[-1]).__name__ if self._wirings else ""
        self.foreign = self.foreign or wiring or what

    def _add(self, module: nn.Module | None, inputs: Iterable[Tensor], output: Tensor) -> None:
        known = tuple(self.number(value) for value in inputs if self.knows(value))
        if not known:
            self.refuse(f"the input of {type(module).__name__}")
        self.computed.append(Computed(module, known, self.number(output)))


Number = TypeVar("Number", int, float)


class RotationKey(NamedTuple):
    """A RoPE rotation that a program uses, and the dtype in which it multiplies."""

    rope: RopeConfig
    head_dim: int
    dtype: torch.dtype


class CacheShape(NamedTuple):
    """Shape of the keys and values that an attention layer stores for each token."""

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
    table_users: tuple[int, ...]
    """For each kind of block table, the index of a layer that uses it."""
    dtype: torch.dtype
    """Dtype of the weights."""


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
        self._before = _Uses()  # uses of the stages since the last wait, without the last stage

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

    def table(self, reach: int | None) -> int:
        """Return the index of the block tables that the next attention layer uses.

        Layers that see the same number of latest tokens (`reach`; None: all) share block tables.
        """
        self._table_users.setdefault(reach, len(self.layers))
        return list(self._table_users).index(reach)

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
            tuple(self.layers),
            tuple(self._table_users.values()),
            self.dtype,
        )


def _filled(given: Sequence[Number], count: int) -> list[Number | int]:
    return [*given, *[0] * (count - len(given))]


Key = TypeVar("Key", bound=Hashable)


def _number(one: Key, known: dict[Key, None]) -> int:
    """Return the index of `one` among the keys of `known`; a new key is added."""
    known.setdefault(one)
    return list(known).index(one)
