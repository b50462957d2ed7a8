"""The program of a decoder's step: an instruction for each computation that was recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from workhorse.native.decoding import GROUP
from workhorse.native.steps import ACTIVATIONS, Norm, Op, Rotation
from workhorse.nn import Decoder
from workhorse.nn.attention.grouped import Attention
from workhorse.nn.attention.qk_norm import AllHeadsNorm, rotate_then_norm
from workhorse.nn.attention.self_attention import Float32Rotation
from workhorse.nn.attention.self_attention import Rotation as RotationModule
from workhorse.nn.elementwise import Multiplier, RoundedMultiplier, Unchanged
from workhorse.nn.feedforward import Gated, ReluSquared
from workhorse.nn.norms import (
    Float32LayerNorm,
    LayerNorm,
    LowPrecisionLayerNorm,
    RMSNorm,
    RMSNormMultipliedFirst,
)
from workhorse.nn.positions.absolute import LearnedPositions
from workhorse.nn.positions.rope import RopeConfig
from workhorse.transforms.native_attention import DecodingSdpa
from workhorse.transforms.quantization.quantized_linear import QuantizedLinear
from workhorse.transforms.steps.recorded import CannotTranslate, Computed, record_modules
from workhorse.transforms.stream import StreamedLinear


class Turn(NamedTuple):
    """A rotation whose angles a program needs, in the dtype that it multiplies in."""

    rope: RopeConfig
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Program:
    """What `Steps.run` takes besides the tokens and the cache; see there."""

    instructions: Tensor
    numbers: Tensor
    registers: Tensor
    weights: tuple[Tensor, ...]
    turns: tuple[Turn, ...]
    reaches: Tensor


def translate(decoder: Decoder) -> Program:
    """The program of a decoder that was prepared for inference on a CPU.

    Raises:
        CannotTranslate: it computes something that the instructions do not.
    """
    dtypes = {weight.dtype for weight in decoder.parameters()}
    if len(dtypes) > 1:
        raise CannotTranslate(f"weights of {len(dtypes)} dtypes")
    recorded = record_modules(decoder, TRANSLATIONS)
    writer = Writer(decoder, recorded)
    for place, computed in enumerate(recorded):
        writer.follow(place, computed)
    return writer.program()


class Register(NamedTuple):
    """A place for a value: `width` numbers for each token, packed or not."""

    number: int
    width: int
    packed: bool = False


NOWHERE = Register(-1, 0)


class Writer:
    """Writes a program, computation by computation.

    A register is used again once its value has no more readers. An instruction waits for those
    before it if one of them writes what it uses, or uses what it writes.

    Args:
        decoder: whose program it is.
        recorded: its computations.
    """

    def __init__(self, decoder: Decoder, recorded: Sequence[Computed]) -> None:
        self.decoder = decoder
        self.dtype = next(decoder.parameters()).dtype
        self._code: list[list[int]] = []
        self._numbers: list[list[float]] = []
        self._registers = [Register(0, decoder.config.vocab_size)]
        self._free: list[Register] = []
        self._values: dict[int, Register] = {}
        self._packed: dict[Register, Register] = {}
        self._last_read = {n: place for place, one in enumerate(recorded) for n in one.inputs}
        self._logits = recorded[-1].output
        self._weights: dict[int, Tensor] = {}
        self._turns: dict[Turn, None] = {}
        self._reaches: dict[tuple[int, int], None] = {}
        self._tables: dict[int | None, None] = {}
        self._layers = 0
        self._written: set[Register] = set()
        self._read: set[Register] = set()

    def follow(self, place: int, computed: Computed) -> None:
        """Write what computation number `place` does."""
        module = computed.module
        inputs = [self._values[n] for n in computed.inputs if n in self._values]
        if module is self.decoder.final_norm:
            (x,) = inputs
            inputs = [self.write(Op.LAST, self.reserve(x.width), x)]
        if module is None:
            made = self.write(Op.ADD, self.reserve(inputs[0].width), *inputs)
        else:
            made = TRANSLATIONS[type(module)](self, module, *inputs)
        self._values[computed.output] = made
        for n in set(computed.inputs):
            value = self._values.get(n)
            if value is not None and value != made and self._last_read[n] == place:
                self.release(value)

    def program(self) -> Program:
        """What was written."""
        result = self._values[self._logits].number
        last = self._code[-1]
        assert last[2] == result, "the logits are written last"
        last[2] = 0
        return Program(
            torch.tensor(self._code),
            torch.tensor(self._numbers, dtype=torch.float64),
            torch.tensor([[one.width, int(one.packed)] for one in self._registers]),
            tuple(self._weights.values()),
            tuple(self._turns),
            torch.tensor(list(self._reaches)),
        )

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
        """Write an instruction (`ops/step.h`); returns the register of its result."""
        read = {source, other} - {NOWHERE}
        waits = op is Op.LAST or bool(self._written & {to, *read}) or to in self._read
        if waits:
            self._written, self._read = set(), set()
        self._written.add(to)
        self._read |= read
        registers = [to.number, source.number, other.number]
        weights = [self.weight(weight), self.weight(bias)]
        self._code.append([op, waits, *registers, *weights, *_filled(options, 4, 0)])
        self._numbers.append(_filled(numbers, 2, 0.0))
        return to

    def reserve(self, width: int, packed: bool = False) -> Register:
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

    def weight(self, tensor: Tensor | None) -> int:
        """The number of a weight, -1 for none."""
        if tensor is None:
            return -1
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise CannotTranslate("a weight that is not contiguous on the CPU")
        self._weights.setdefault(id(tensor), tensor)
        return list(self._weights).index(id(tensor))

    def linear(self, module: nn.Module, x: Register) -> Register:
        """`x Wᵀ + b`, W as it is or packed."""
        if isinstance(module, QuantizedLinear):
            return self._packed_linear(module, x)
        layer = cast(nn.Linear, module)
        to, options = self.reserve(layer.out_features), (layer.out_features,)
        return self.write(Op.LINEAR, to, x, weight=layer.weight, bias=layer.bias, options=options)

    def _packed_linear(self, layer: QuantizedLinear, x: Register) -> Register:
        if layer.decoding is None or layer.in_features % GROUP:
            raise CannotTranslate("packed weights that no operator multiplies")
        if x not in self._packed:
            self._packed[x] = self.write(Op.PACK, self.reserve(x.width, packed=True), x)
        options = (layer.out_features, self.weight(layer.scales), self.weight(layer.table))
        return self.write(
            Op.PACKED_LINEAR,
            self.reserve(layer.out_features),
            self._packed[x],
            weight=layer.codes,
            bias=layer.bias,
            options=options,
        )

    def norm(self, module: nn.Module, x: Register, to: Register | None = None) -> Register:
        """A norm of each row; where it has a width of its own, of each part of that width."""
        norm, how = cast(Any, module), NORMS.get(type(module))
        if how is None:
            raise CannotTranslate(type(module).__name__)
        width = x.width if norm.weight is None else norm.weight.numel()
        return self.write(
            Op.NORM,
            to or self.reserve(x.width),
            x,
            weight=norm.weight,
            bias=getattr(norm, "bias", None),
            options=(width, how),
            numbers=(norm.eps, 0.0 if norm.weight is None else norm.offset),
        )

    def attention(self, module: nn.Module, x: Register) -> Register:
        """A whole layer of attention, up to its output projection."""
        layer = cast(Attention, module)
        _check(layer)
        q, k, v = (self.linear(one, x) for one in (layer.q_proj, layer.k_proj, layer.v_proj))
        self._norm_and_rotate(layer, q, layer.q_norm, layer.q_rotation)
        self._norm_and_rotate(layer, k, layer.k_norm, layer.k_rotation)
        cached = self._layers, _number(layer.pattern.reach, self._tables)
        self._layers += 1
        seen = _number((layer.pattern.window or 0, layer.pattern.chunk or 0), self._reaches)
        # The cache is no register: `k` stands for what is stored and attended to.
        self.write(Op.STORE, k, k, v, options=cached)
        y = self.reserve(layer.n_heads * layer.value_dim)
        options, scale = (layer.n_heads, *cached, seen), layer.kernel.scoring.scale
        self.write(Op.ATTEND, y, q, k, options=options, numbers=(scale,))
        self.release(q, k, v)
        if type(layer.inner_norm) is not nn.Identity:
            self.norm(layer.inner_norm, y, to=y)
        made = self.linear(layer.out_proj, y)
        self.release(y)
        return made

    def _norm_and_rotate(
        self, layer: Attention, x: Register, norm: nn.Module, rotation: nn.Module
    ) -> None:
        """In place, in the order of the layer."""
        after = layer.norm_and_rotate is rotate_then_norm
        if after:
            self._rotate(layer.head_dim, rotation, x)
        if type(norm) is not nn.Identity:
            self.norm(norm.norm if isinstance(norm, AllHeadsNorm) else norm, x, to=x)
        if not after:
            self._rotate(layer.head_dim, rotation, x)

    def _rotate(self, head_dim: int, module: nn.Module, x: Register) -> None:
        if type(module) is Unchanged:
            return
        rotation = cast(RotationModule, module)
        if rotation.rope.depends_on_length:
            raise CannotTranslate("a rotation that depends on the text's length")
        how, dtype = Rotation(0), self.dtype
        if type(module) is Float32Rotation:
            how, dtype = Rotation.IN_FLOAT32, torch.float32
        if rotation.rope.pairing == "interleaved":
            how |= Rotation.INTERLEAVED
        turn = _number(Turn(rotation.rope, head_dim, dtype), self._turns)
        self.write(Op.ROTATE, x, x, options=(head_dim, turn, how))


def _filled(given: Sequence[Any], count: int, by: Any) -> list[Any]:
    return [*given, *[by] * (count - len(given))]


def _number(one: Any, known: dict[Any, None]) -> int:
    """Which of the known ones this is, a new one if need be."""
    known.setdefault(one)
    return list(known).index(one)


def _check(layer: Attention) -> None:
    if type(layer.kernel) is not DecodingSdpa or layer.pattern.alibi_slopes:
        raise CannotTranslate("attention by a kernel or with biases that no instruction has")
    parts = (layer.q_clip, layer.k_clip, layer.v_clip, layer.scale_queries, layer.gate)
    for part in parts:
        if type(part) not in (nn.Identity, Unchanged):
            raise CannotTranslate(type(part).__name__)


def _embed(writer: Writer, module: nn.Module) -> Register:
    table = cast(nn.Embedding, module)
    return writer.write(Op.EMBED, writer.reserve(table.embedding_dim), weight=table.weight)


def _embed_positions(writer: Writer, module: nn.Module, x: Register) -> Register:
    positions = cast(LearnedPositions, module)
    vectors, to = writer.reserve(x.width), writer.reserve(x.width)
    table, options = positions.table.weight, (positions.offset,)
    writer.write(Op.EMBED_POSITION, vectors, weight=table, options=options)
    writer.write(Op.ADD, to, x, vectors)
    writer.release(vectors)
    return to


def _keep(_writer: Writer, _module: nn.Module, x: Register) -> Register:
    return x


def _scale(writer: Writer, module: nn.Module, x: Register) -> Register:
    factor = cast(Multiplier, module).multiplier
    if type(module) is RoundedMultiplier:
        factor = float(torch.tensor(factor, dtype=writer.dtype))
    return writer.write(Op.SCALE, writer.reserve(x.width), x, numbers=(factor,))


def _activate(writer: Writer, module: nn.Module, x: Register, up: Register = NOWHERE) -> Register:
    if isinstance(module, Gated):
        module = module.activation
    name = _ACTIVATIONS.get(type(module))
    if name is None:
        raise CannotTranslate(type(module).__name__)
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        name = "gelu_tanh"
    options = (ACTIVATIONS.index(name),)
    return writer.write(Op.ACTIVATE, writer.reserve(x.width), x, up, options=options)


_ACTIVATIONS = {
    nn.ReLU: "relu",
    ReluSquared: "relu2",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
}
_LAYER_NORM = Norm.CENTRED | Norm.ROUNDED_GAIN
NORMS = {
    LayerNorm: _LAYER_NORM,
    LowPrecisionLayerNorm: _LAYER_NORM,
    Float32LayerNorm: _LAYER_NORM,
    RMSNorm: Norm.ROUNDED_NORMAL | Norm.ROUNDED_GAIN,
    RMSNormMultipliedFirst: Norm(0),
}
TRANSLATIONS: dict[type[nn.Module], Callable[..., Register]] = {
    nn.Embedding: _embed,
    LearnedPositions: _embed_positions,
    **dict.fromkeys((nn.Identity, nn.Dropout, Unchanged), _keep),
    **dict.fromkeys((Multiplier, RoundedMultiplier), _scale),
    **dict.fromkeys((Gated, *_ACTIVATIONS), _activate),
    **dict.fromkeys((StreamedLinear, QuantizedLinear), Writer.linear),
    **dict.fromkeys(NORMS, Writer.norm),
    Attention: Writer.attention,
}
"""How each kind of module is translated."""
