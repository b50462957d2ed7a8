"""TransformerLens's names of tensors, for readers and code that know them.

A name such as `blocks.0.attn.hook_z` is the tensor of one of our modules in TransformerLens's
layout, (batch, seq, heads, width). Names and layouts: TransformerLens 4.3. `make campaign-lens`
compares the values.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.nn import Decoder


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class View:
    """The layout in which a name shows a tensor.

    Attributes:
        read: function from the tensor to this view.
        write: function from a new view and the old tensor to the new tensor.
        gradient: function from the gradient of the tensor to the gradient of the view.
    """

    read: Callable[[Tensor], Tensor] = _same
    write: Callable[[Tensor, Tensor], Tensor] = lambda new, old: new
    gradient: Callable[[Tensor], Tensor] = _same


AS_IS = View()


def _linear(read: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], Tensor]) -> View:
    """A view that rearranges or selects elements."""
    return View(read, write, read)


SWAPPED = _linear(lambda x: x.transpose(1, 2), lambda new, old: new.transpose(1, 2))
"""(batch, heads, seq, width) as (batch, seq, heads, width)."""


def _by_head(heads: int) -> View:
    """(batch, seq, heads · width) as (batch, seq, heads, width)."""
    return _linear(lambda x: x.unflatten(-1, (heads, -1)), lambda new, old: new.flatten(2))


def _without_sink(x: Tensor) -> Tensor:
    return x[..., : x.shape[-2]]


_SCORES = _linear(
    _without_sink, lambda new, old: torch.cat((new, old[..., old.shape[-2] :]), dim=-1)
)
_WHOLE = {
    "hook_embed": "embedding.positions.x",
    "hook_pos_embed": "embedding.positions.table",
    "ln_final.hook_out": "final_norm",
    "unembed.hook_in": "head.proj.x",
    "unembed.hook_out": "head.proj",
}
_LAYER = {
    "hook_resid_pre": "x",
    "hook_resid_mid": "attention_sum",
    "hook_resid_post": "",
    "attn.hook_in": "attention.x",
    "hook_attn_out": "attention_branch",
    "mlp.hook_in": "feed_forward.x",
    "hook_mlp_out": "feed_forward_branch",
    "attn.hook_pattern": "attention.kernel.weights",
    "mlp.hook_pre_linear": "feed_forward.up_proj",
    "mlp.hook_post": "feed_forward.down_proj.x",
}


def resolve(decoder: Decoder, name: str) -> tuple[str, View]:
    """Our name of a tensor, and the layout in which `name` shows it.

    Names that are not TransformerLens's are returned unchanged.

    Raises:
        WorkhorseError: `name` is not a string.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WorkhorseError(f"{shown(name)} is not the name of a tensor; give a string")
    if "hook_" not in name:
        return name, AS_IS
    if name in _WHOLE:
        return _WHOLE[name], AS_IS
    if name == "ln_final.hook_normalized":
        return "final_norm", _normalized(decoder.final_norm)
    found = re.fullmatch(r"blocks\.([0-9]{1,9}|\*)\.(.+)", name)
    if found is None:
        return name, AS_IS
    layer, rest = found.groups()
    block = decoder.layers[0 if layer == "*" else min(int(layer), len(decoder.layers) - 1)]
    own, view = _in_layer(block, rest)
    return f"layers.{layer}.{own}".rstrip("."), view


def _in_layer(block: Any, rest: str) -> tuple[str, View]:
    if rest in _LAYER:
        return _LAYER[rest], AS_IS
    if rest == "mlp.hook_pre":
        gated = hasattr(block.feed_forward, "gate_proj")
        return f"feed_forward.{'gate' if gated else 'up'}_proj", AS_IS
    if rest.startswith("attn."):
        return _in_attention(block.attention, rest)
    norm, _, tap = rest.partition(".")
    if norm in ("ln1", "ln2") and tap in ("hook_out", "hook_normalized"):
        own = "attention_norm" if norm == "ln1" else "feed_forward_norm"
        own = "norm" if hasattr(block, "norm") else own
        return own, AS_IS if tap == "hook_out" else _normalized(getattr(block, own))
    return rest, AS_IS


def _in_attention(attention: Any, rest: str) -> tuple[str, View]:
    kind = rest.removeprefix("attn.hook_")
    letter = kind[-1:]
    grouped = hasattr(attention, "k_proj")  # latent attention has no projection to keys
    if kind == "z":
        return "attention.out_proj.x", _by_head(attention.n_heads)
    if kind == "attn_scores":
        return "attention.kernel.scores", _SCORES
    if kind in ("q", "k", "v"):
        if not grouped:
            return f"attention.kernel.{letter}", AS_IS
        heads = attention.n_heads if kind == "q" else attention.n_kv_heads
        return f"attention.{letter}_proj", _by_head(heads)
    if kind in ("rot_q", "rot_k"):
        scaled = kind == "rot_q" and hasattr(getattr(attention, "scale_queries", None), "growth")
        return f"attention.{'scale_queries' if scaled else f'{letter}_rotation'}", SWAPPED
    return rest, AS_IS


def _normalized(norm: Any) -> View:
    """The output of a norm before its weight and its bias."""
    if not hasattr(norm, "offset") or norm.weight is None:
        return AS_IS
    gain = norm.weight.detach() + norm.offset
    bias = 0 if norm.bias is None else norm.bias.detach()
    return View(lambda y: (y - bias) / gain, lambda new, old: new * gain + bias, lambda g: g * gain)
