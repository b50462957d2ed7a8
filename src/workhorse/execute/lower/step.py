"""Translate modules, and a whole decoder, to instructions of the native step operator."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from workhorse.execute.activation_names import NATIVE_ACTIVATIONS, activation_name
from workhorse.execute.lower import experts
from workhorse.execute.lower.program import (
    NOWHERE,
    CacheShape,
    Program,
    Register,
    RotationKey,
    Writer,
)
from workhorse.execute.native_decoding.layers import ATTENDED, DecodingSdpa, StreamedLinear
from workhorse.execute.record import CannotTranslate, record_modules
from workhorse.native.decoding import GROUP
from workhorse.native.steps import (
    ACTIVATIONS,
    NormFlag,
    Op,
    RotationFlag,
)
from workhorse.nn import Decoder
from workhorse.nn.attention.grouped import Attention, OutputGate, QueryScaling
from workhorse.nn.attention.kernels import Eager
from workhorse.nn.attention.masks import slopes_of_distance
from workhorse.nn.attention.self_attention import (
    AllHeadsNorm,
    EachHeadNorm,
    Rotation,
    norm_then_rotate,
    rotate_then_norm,
    rotation_precision,
)
from workhorse.nn.blocks import Block
from workhorse.nn.convolution import ShortConvolution
from workhorse.nn.elementwise import (
    Clip,
    Multiplier,
    RoundedMultiplier,
    SoftCap,
    Unchanged,
    is_identity,
)
from workhorse.nn.experts.router import (
    ALWAYS_FLOAT32,
)
from workhorse.nn.feedforward import XIELU, ClampedSwiglu, Gated
from workhorse.nn.norms import Norm, norm_facts
from workhorse.nn.positions.absolute import LearnedPositions, SinusoidalPositions
from workhorse.transforms.lora import LoraLinear, LoraQuantizedLinear, LowRank
from workhorse.transforms.quantization import QuantizedLinear

KERNELS = (DecodingSdpa, Eager)


def translate(decoder: Decoder) -> Program:
    """Return the step program of a decoder.

    Args:
        decoder: the decoder on a CPU, after `stream_weights` and `attend_natively`.

    Raises:
        CannotTranslate: a computation has no instruction.
    """
    named = decoder.named_parameters()
    dtypes = {weight.dtype for name, weight in named if not name.endswith(ALWAYS_FLOAT32)}
    if len(dtypes) > 1 or not dtypes <= set(ATTENDED):
        raise CannotTranslate(f"weights of dtypes {dtypes}")
    recorded = record_modules(decoder, lambda module: _translation(module) is not None)
    last_read = {n: place for place, one in enumerate(recorded) for n in one.inputs}
    blocks = cast(list[Block], list(decoder.layers))
    cached = [part for one in blocks for part in (one.attention, *one.convolutions().values())]
    writer = Writer(decoder.config.vocab_size, *dtypes, cached=cached, translation=_translation)
    values: dict[int, Register] = {}
    for place, (module, inputs, output, _) in enumerate(recorded):
        given = [values[n] for n in inputs if n in values]
        if module is decoder.final_norm:  # logits of earlier tokens may not be needed
            (x,) = given
            given = [writer.write(Op.LAST, writer.reserve(x.width), x)]
        if module is None:
            made = writer.write(Op.ADD, writer.reserve(given[0].width), *given)
        else:
            made = writer.module(module, *given)
        values[output] = made
        ended = {values[n] for n in inputs if n in values and last_read[n] == place}
        writer.release(*ended - {made})
    return writer.program()


def _translation(module: nn.Module) -> Callable[..., Register] | None:
    """Return the function that writes a module's instructions; None if it cannot be translated."""
    return TRANSLATIONS.get(type(module)) if norm_facts(module) is None else norm


def linear(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instruction of a linear layer, `x Wᵀ + b`."""
    layer = cast(nn.Linear, module)
    to, options = writer.reserve(layer.out_features), (layer.out_features,)
    return writer.write(Op.LINEAR, to, x, weight=layer.weight, bias=layer.bias, options=options)


def packed_linear(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a linear layer with quantised weights, `x Wᵀ + b`."""
    layer = cast(QuantizedLinear, module)
    if layer.decoding is None or layer.in_features % GROUP:
        raise CannotTranslate("packed weights without a native operator")
    options = (layer.out_features, writer.weight(layer.scales), writer.weight(layer.table))
    return writer.write(
        Op.PACKED_LINEAR,
        writer.reserve(layer.out_features),
        writer.packed(x),
        weight=layer.codes,
        bias=layer.bias,
        options=options,
    )


def adapted(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a linear layer with an adapter, `W x + b + scale · B A x`."""
    layer = cast(LoraLinear | LoraQuantizedLinear, module)
    y = (linear if isinstance(layer, LoraLinear) else packed_linear)(writer, layer, x)
    if layer.active is None:
        return y
    adapter = layer.adapters[layer.active]
    if type(adapter) is not LowRank:
        raise CannotTranslate(type(adapter).__name__)
    narrow = writer.module(adapter.lora_a, x)
    update = writer.module(adapter.lora_b, narrow)
    writer.write(Op.SCALE, update, update, numbers=(adapter.scale,))
    made = writer.write(Op.ADD, writer.reserve(y.width), y, update)
    writer.release(y, narrow, update)
    return made


def norm(
    writer: Writer,
    module: nn.Module,
    x: Register,
    to: Register | None = None,
    width: int | None = None,
    *,
    slices: range | None = None,
) -> Register:
    """Write the instruction of a norm.

    Args:
        writer: the program.
        module: the norm.
        x: its input.
        to: the register of the result; None for a new one.
        width: number of elements that are normed together, such as a head; None: a whole row.
        slices: indices of the slices of this width that are normed; None: all.
    """
    facts, part = norm_facts(module), cast(Norm, module)
    if facts is None:
        raise CannotTranslate(type(module).__name__)
    flags = zip(NormFlag, facts, strict=True)
    how = sum(flag for flag, holds in flags if holds)
    width = width or x.width
    slices = slices or range(x.width // width)
    gain, shift = part.weight, part.bias
    if any(one is not None and one.numel() != width for one in (gain, shift)):
        raise CannotTranslate("a norm whose weights do not have its width")
    return writer.write(
        Op.NORM,
        to or writer.reserve(x.width),
        x,
        weight=gain,
        bias=shift,
        options=(width, how, slices.start * width, slices.stop * width),
        numbers=(part.eps, 0.0 if gain is None else part.offset),
    )


def attention(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of an attention layer, including its projections."""
    layer = cast(Attention, module)
    _check(layer)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    clips = (layer.q_clip, layer.k_clip, layer.v_clip)
    pairs = zip(projections, clips, strict=True)
    q, k, v = (writer.modules((clip,), writer.module(one, x)) for one, clip in pairs)
    _norm_and_rotate(writer, layer, q, layer.q_norm, layer.q_rotation)
    _norm_and_rotate(writer, layer, k, layer.k_norm, layer.k_rotation)
    q = writer.modules((layer.scale_queries,), q)
    shape = CacheShape(layer.n_kv_heads, layer.head_dim, layer.value_dim)
    cached = writer.entry(layer, layer.pattern.reach, shape)
    # The cache is not a register: `k` represents the stored keys and values.
    writer.write(Op.STORE, k, k, v, options=cached)
    y = writer.reserve(layer.n_heads * layer.value_dim)
    seen = writer.reach(layer.pattern.window, layer.pattern.chunk)
    scoring, slopes = layer.kernel.scoring, slopes_of_distance(layer.pattern)
    writer.write(
        Op.ATTEND,
        y,
        q,
        k,
        weight=slopes,
        bias=layer.kernel.sinks,
        options=(layer.n_heads, *cached, seen),
        numbers=(scoring.scale, scoring.softcap or 0.0),
    )
    writer.release(q, k, v)
    y = writer.module(layer.gate, y, x)
    if type(layer.inner_norm) is not nn.Identity:
        norm(writer, layer.inner_norm, y, to=y)
    made = writer.module(layer.out_proj, y)
    writer.release(y)
    return made


def _check(layer: Attention) -> None:
    other = layer.pattern.alibi_slopes and slopes_of_distance(layer.pattern) is None
    if type(layer.kernel) not in KERNELS or other:
        raise CannotTranslate("an attention kernel or bias without an instruction")


def _norm_and_rotate(
    writer: Writer, layer: Attention, x: Register, head_norm: nn.Module, rotation: nn.Module
) -> None:
    """Write the norm and the rotation of queries or keys x, in the layer's order, in place."""
    if layer.norm_and_rotate not in (norm_then_rotate, rotate_then_norm):
        raise CannotTranslate(layer.norm_and_rotate.__name__)
    after = layer.norm_and_rotate is rotate_then_norm
    if after:
        _rotate(writer, layer.head_dim, rotation, x)
    if isinstance(head_norm, AllHeadsNorm):
        norm(writer, head_norm.norm, x, to=x)
    elif isinstance(head_norm, EachHeadNorm):
        for head, one in enumerate(head_norm.heads):
            norm(writer, one, x, x, layer.head_dim, slices=range(head, head + 1))
    elif type(head_norm) is not nn.Identity:
        norm(writer, head_norm, x, to=x, width=layer.head_dim)
    if not after:
        _rotate(writer, layer.head_dim, rotation, x)


def _rotate(writer: Writer, head_dim: int, module: nn.Module, x: Register) -> None:
    if is_identity(module):
        return
    precision = rotation_precision(module)
    if precision is None:
        raise CannotTranslate(type(module).__name__)
    rope = cast(Rotation, module).rope
    if rope.depends_on_length:
        raise CannotTranslate("a rotation that depends on the sequence length")
    how, dtype = RotationFlag(0), writer.dtype
    if precision == "float32":
        how, dtype = RotationFlag.IN_FLOAT32, torch.float32
    if rope.pairing == "interleaved":
        how |= RotationFlag.INTERLEAVED
    options = (head_dim, writer.rotation(RotationKey(rope, head_dim, dtype)), how)
    writer.write(Op.ROTATE, x, x, options=options)


def convolution(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a short convolution; its inputs are stored as keys."""
    layer = cast(ShortConvolution, module)
    cached = writer.entry(layer, layer.width, CacheShape(1, layer.d_model, 0))
    # The cache is not a register: `y` represents the stored inputs.
    y = writer.write(Op.STORE, writer.reserve(x.width), x, x, options=cached)
    options = (*cached, layer.width)
    return writer.write(Op.CONVOLVE, y, x, y, weight=layer.weight, options=options)


def _embed(writer: Writer, module: nn.Module) -> Register:
    table = cast(nn.Embedding, module)
    return writer.write(Op.EMBED, writer.reserve(table.embedding_dim), weight=table.weight)


def _embed_positions(writer: Writer, module: nn.Module, x: Register) -> Register:
    positions = cast(LearnedPositions, module)
    vectors, table = writer.reserve(x.width), positions.table.weight
    writer.write(Op.EMBED_POSITION, vectors, weight=table, options=(positions.offset,))
    made = writer.write(Op.ADD, writer.reserve(x.width), x, vectors)
    writer.release(vectors)
    return made


def _add_waves(writer: Writer, module: nn.Module, x: Register) -> Register:
    positions = cast(SinusoidalPositions, module)
    options = (positions.wave.offset, positions.wave.layout == "halves")
    speeds = positions.speeds(torch.device("cpu"))
    vectors = writer.write(Op.WAVE, writer.reserve(x.width), weight=speeds, options=options)
    made = writer.write(Op.ADD, writer.reserve(x.width), x, vectors)
    writer.release(vectors)
    return made


def _clip(writer: Writer, module: nn.Module, x: Register) -> Register:
    return writer.write(Op.CLIP, writer.reserve(x.width), x, numbers=(cast(Clip, module).limit,))


def _grow(writer: Writer, module: nn.Module, q: Register) -> Register:
    growth = cast(QueryScaling, module).growth
    options, numbers = (growth.length, growth.offset), (growth.scale,)
    return writer.write(Op.GROW, writer.reserve(q.width), q, options=options, numbers=numbers)


def _gate(writer: Writer, module: nn.Module, y: Register, x: Register) -> Register:
    """Write the gate of an attention layer's outputs y, in place."""
    gate = writer.module(cast(OutputGate, module).proj, x)
    writer.write(Op.ACTIVATE, y, gate, y, options=(ACTIVATIONS.index("sigmoid"),))
    writer.release(gate)
    return y


def _keep(_writer: Writer, _module: nn.Module, x: Register, *_: Register) -> Register:
    return x


def _scale(writer: Writer, module: nn.Module, x: Register) -> Register:
    factor = cast(Multiplier, module).factor(writer.dtype)
    return writer.write(Op.SCALE, writer.reserve(x.width), x, numbers=(factor,))


def _activate(writer: Writer, module: nn.Module, x: Register, up: Register = NOWHERE) -> Register:
    name = activation_name(module)
    if name is None:
        raise CannotTranslate(type(module).__name__)
    options = (ACTIVATIONS.index(name),)
    return writer.write(Op.ACTIVATE, writer.reserve(x.width), x, up, options=options)


def _activate_gate(writer: Writer, module: nn.Module, x: Register, up: Register) -> Register:
    return _activate(writer, cast(Gated, module).activation, x, up)


def _cap(writer: Writer, module: nn.Module, x: Register) -> Register:
    return writer.write(Op.CAP, writer.reserve(x.width), x, numbers=(cast(SoftCap, module).cap,))


def _xielu(writer: Writer, module: nn.Module, x: Register) -> Register:
    part = cast(XIELU, module)
    y = writer.reserve(x.width)
    return writer.write(Op.XIELU, y, x, weight=part.alpha_p, bias=part.alpha_n)


def _clamped_swiglu(writer: Writer, module: nn.Module, gate: Register, up: Register) -> Register:
    part = cast(ClampedSwiglu, module)
    y = writer.reserve(gate.width)
    return writer.write(Op.CLAMPED_SWIGLU, y, gate, up, numbers=(part.limit, part.alpha))


TRANSLATIONS: dict[type[nn.Module], Callable[..., Register]] = {
    nn.Embedding: _embed,
    LearnedPositions: _embed_positions,
    **dict.fromkeys((nn.Identity, nn.Dropout, Unchanged), _keep),
    **dict.fromkeys((Multiplier, RoundedMultiplier), _scale),
    **dict.fromkeys(NATIVE_ACTIVATIONS, _activate),
    Gated: _activate_gate,
    StreamedLinear: linear,
    QuantizedLinear: packed_linear,
    **dict.fromkeys((LoraLinear, LoraQuantizedLinear), adapted),
    Attention: attention,
    ShortConvolution: convolution,
    SinusoidalPositions: _add_waves,
    SoftCap: _cap,
    XIELU: _xielu,
    ClampedSwiglu: _clamped_swiglu,
    Clip: _clip,
    QueryScaling: _grow,
    OutputGate: _gate,
    **experts.TRANSLATIONS,
}
"""For each class of modules, the function that writes its instructions."""
