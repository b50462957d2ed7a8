"""Maps Workhorse's weights to llama.cpp's tensors and back; a tensor is computed when needed."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workhorse.checkpoints.gguf.architecture import Architecture
from workhorse.checkpoints.gguf.metadata import paired, rope_tensors
from workhorse.checkpoints.tensors import weights_of
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.norms import norm_facts

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

TOP_NAMES = {
    "embedding.tokens": "token_embd",
    "embedding.positions.table": "position_embd",
    "embedding.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head.proj": "output",
}
LAYER_NAMES = {
    "norm": "attn_norm",
    "attention_norm": "attn_norm",
    "attention_output_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.out_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_norm.norm": "attn_q_norm",
    "attention.k_norm.norm": "attn_k_norm",
    "attention.q_down_proj": "attn_q_a",
    "attention.q_up_proj": "attn_q_b",
    "attention.kv_down_proj": "attn_kv_a",
    "attention.k_rope_proj": "attn_k_rope",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.k_up_proj": "attn_k_b",
    "attention.v_up_proj": "attn_v_b",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.router.proj": "ffn_gate_inp",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
    "feed_forward.shared.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared.up_proj": "ffn_up_shexp",
    "feed_forward.shared.down_proj": "ffn_down_shexp",
    "feed_forward.shared_gate": "ffn_gate_inp_shexp",
}
LAYER_PARAMETERS = {
    "attention.kernel.sinks": "attn_sinks.weight",
    "feed_forward.router.selection_bias": "exp_probs_b.bias",
}
"""Parameters with names that do not end in `weight` or `bias`."""
TURNING = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
"""Weights whose order of rows depends on which features RoPE pairs."""

SHAPED: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "ffn_gate_inp_shexp": (lambda rows, _: rows.flatten(), lambda theirs: theirs.unsqueeze(0)),
    "attn_k_b": (
        lambda rows, heads: rows.unflatten(0, (heads, -1)).mT,
        lambda theirs: theirs.mT.flatten(0, 1),
    ),
    "attn_v_b": (
        lambda rows, heads: rows.unflatten(0, (heads, -1)),
        lambda theirs: theirs.flatten(0, 1),
    ),
}
"""Weights with another shape in llama.cpp.

Each has a function that converts our weight, given `n_heads`, and a function that converts back.
"""

Make = Callable[[], Tensor]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the file, and a function that computes it on the CPU in float32."""

    name: str
    shape: tuple[int, ...]
    make: Make


@dataclass(frozen=True)
class Part:
    """One of Workhorse's weights: a whole tensor of the file, or some rows of a stacked tensor."""

    ours: str
    tensor: str
    order: int
    """Position of this weight among the weights that the tensor stacks."""
    shape: tuple[int, ...]
    make: Make
    take: Change
    """Function that converts these rows of the file's tensor to Workhorse's weight."""


def plan_tensors(architecture: Architecture, decoder: Decoder) -> list[TensorPlan]:
    """Plan the tensors of the file, which together contain all weights of the decoder.

    Raises:
        WorkhorseError: llama.cpp has no tensor for a weight.
    """
    parts = tensor_parts(architecture, decoder)
    plans = [joined(name, members) for name, members in parts.items()]
    if architecture.copied_head and HEAD not in parts:
        tied = parts[EMBEDDING][0]
        plans.append(TensorPlan(HEAD, tied.shape, tied.make))
    for name, factors in _rope_factors(decoder).items():
        plans.append(TensorPlan(name, tuple(factors.shape), partial(torch.clone, factors)))
    return plans


def tensor_parts(
    architecture: Architecture, decoder: Decoder, weights: Mapping[str, Tensor] | None = None
) -> dict[str, list[Part]]:
    """Map each tensor name of the file to the weights that it stacks, in the order of rows.

    Args:
        architecture: the architecture that defines the tensor names.
        decoder: any decoder, also one on the meta device.
        weights: tensors with the rows of some weights, by name; None for the weights themselves.

    Raises:
        WorkhorseError: the architecture has no tensor for a weight.
    """
    parts: dict[str, list[Part]] = {}
    for part in _parts(architecture, decoder, weights_of(decoder) if weights is None else weights):
        parts.setdefault(part.tensor, []).append(part)
    return {name: sorted(members, key=lambda part: part.order) for name, members in parts.items()}


def _parts(
    architecture: Architecture, decoder: Decoder, weights: Mapping[str, Tensor]
) -> Iterator[Part]:
    fused = {
        one: (whole, order)
        for whole, several in architecture.fused.items()
        for order, one in enumerate(several)
    }
    blocks = [decoder.config.blocks[name] for name in decoder.config.layer_names()]
    offsets = _offset_weights(decoder)
    for name, weight in weights.items():
        layer, theirs, kind, head = _their_name(name, architecture)
        offset = float(name in offsets)
        make, take = partial(_values, weight, offset), partial(_less, offset)
        shape = tuple(weight.shape)
        if layer is not None and theirs in TURNING:
            make, take = _turned(make, take, blocks[layer], decoder, architecture)
        if head is not None:
            make, take, shape = partial(_as_row, make), partial(_as_vector, take), (1, *shape)
        if layer is not None and theirs in SHAPED:
            (change, take), heads = SHAPED[theirs], blocks[layer].attention.n_heads
            shape = tuple(change(torch.empty(shape, device="meta"), heads).shape)
            make = partial(_changed, make, change, heads)
        whole, order = fused.get(theirs, (theirs, head or 0))
        prefix = "" if layer is None else f"blk.{layer}."
        yield Part(name, f"{prefix}{whole}.{kind}", order, shape, make, take)


def _their_name(name: str, architecture: Architecture) -> tuple[int | None, str, str, int | None]:
    """Translate the name of one of our weights to llama.cpp's.

    Returns:
        The layer index or None, llama.cpp's name in that layer, `weight` or `bias`, and the head
        index of a norm with one weight per head, else None.
    """
    layer, inner, names = None, name, TOP_NAMES
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        layer, inner, names = int(found[1]), found[2], LAYER_NAMES | dict(architecture.names)
    if inner in LAYER_PARAMETERS:
        theirs, _, kind = LAYER_PARAMETERS[inner].partition(".")
        return layer, theirs, kind, None
    module, _, kind = inner.rpartition(".")
    head = None
    if found := re.fullmatch(r"(.+_norm)\.heads\.(\d+)", module):
        module, head = found[1], int(found[2])
    if module not in names:
        raise WorkhorseError(
            f"llama.cpp's architecture {architecture.name} has no tensor for {name}; keep the "
            "model as a Hugging Face directory"
        )
    return layer, names[module], kind, head


def _turned(
    make: Make,
    take: Change,
    block: BlockConfig,
    decoder: Decoder,
    architecture: Architecture,
) -> tuple[Make, Change]:
    """Extend `make` and `take` by the reordering of rows if llama.cpp has another RoPE pairing."""
    rope = block.rope
    if block.grouped is None or rope is None:
        return make, take
    head_dim = block.grouped.key_dim(decoder.config.d_model)
    order = partial(paired, head_dim=head_dim, rotary_dim=rope.rotary_dim(head_dim))
    ours, theirs = rope.pairing, architecture.pairing
    return (
        lambda: order(make(), ours=ours, theirs=theirs),
        lambda rows: take(order(rows, ours=theirs, theirs=ours)),
    )


def joined(name: str, parts: list[Part]) -> TensorPlan:
    """Plan the tensor that stacks the rows of some parts."""
    if len(parts) == 1:
        return TensorPlan(name, parts[0].shape, parts[0].make)
    rows = sum(part.shape[0] for part in parts)
    return TensorPlan(name, (rows, *parts[0].shape[1:]), partial(_concatenated, parts))


def _concatenated(parts: list[Part]) -> Tensor:
    return torch.cat([part.make() for part in parts])


def _as_row(make: Make) -> Tensor:
    return make().unsqueeze(0)


def _changed(make: Make, change: Callable[[Tensor, int], Tensor], heads: int) -> Tensor:
    return change(make(), heads)


def _values(weight: Tensor, offset: float) -> Tensor:
    return weight.float().cpu() + offset if offset else weight.float().cpu()


def _less(offset: float, values: Tensor) -> Tensor:
    return values - offset if offset else values


def _as_vector(take: Change, row: Tensor) -> Tensor:
    return take(row.squeeze(0))


def _offset_weights(decoder: Decoder) -> set[str]:
    """Return the names of norm weights that Workhorse stores minus 1, unlike llama.cpp."""
    return {
        f"{name}.weight"
        for name, module in decoder.named_modules()
        if norm_facts(module) is not None and module.offset
    }


def _rope_factors(decoder: Decoder) -> dict[str, Tensor]:
    """Return the tensors of RoPE frequency divisors that the file needs; all layers share them."""
    for name in decoder.config.layer_names():
        block = decoder.config.blocks[name]
        if block.grouped is not None and block.rope is not None:
            found = rope_tensors(block.rope, block.grouped.key_dim(decoder.config.d_model))
            if found:
                return found
    return {}
