"""TransformerLens's names of tensors, for readers and code that know them.

A name such as `blocks.0.attn.hook_z` is the tensor of one of our modules in TransformerLens's
layout, (batch, seq, heads, width). Names and layouts: TransformerLens 4.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workhorse.nn import Decoder


def _same(x: Tensor) -> Tensor:
    return x


def _swap(x: Tensor) -> Tensor:
    """(batch, heads, seq, width) to (batch, seq, heads, width), and back."""
    return x.transpose(1, 2)


@dataclass(frozen=True)
class View:
    """The layout in which a name shows a tensor."""

    read: Callable[[Tensor], Tensor] = _same
    write: Callable[[Tensor], Tensor] = _same

    def edit(self, edit: Any) -> Any:
        """An edit of the tensor itself, from an edit of this view of it."""
        if self.read is _same:
            return edit
        if isinstance(edit, Tensor):
            return self.write(edit)
        return lambda x: self.write(edit(self.read(x)))


AS_IS, PER_HEAD = View(), View(_swap, _swap)

_WHOLE = {
    "hook_embed": "embedding.positions.x",
    "hook_pos_embed": "embedding.positions.table",
    "ln_final.hook_normalized": "final_norm",
    "unembed.hook_out": "head",
}
_LAYER: dict[str, tuple[str, View]] = {
    "hook_resid_pre": ("x", AS_IS),
    "hook_resid_mid": ("attention_sum", AS_IS),
    "hook_resid_post": ("", AS_IS),
    "hook_attn_in": ("attention.x", AS_IS),
    "hook_attn_out": ("attention_branch", AS_IS),
    "hook_mlp_in": ("feed_forward.x", AS_IS),
    "hook_mlp_out": ("feed_forward_branch", AS_IS),
    "ln1.hook_normalized": ("attention_norm", AS_IS),
    "ln2.hook_normalized": ("feed_forward_norm", AS_IS),
    "attn.hook_rot_q": ("attention.kernel.q", PER_HEAD),
    "attn.hook_rot_k": ("attention.kernel.k", PER_HEAD),
    "attn.hook_v": ("attention.kernel.v", PER_HEAD),
    "attn.hook_attn_scores": ("attention.kernel.scores", AS_IS),
    "attn.hook_pattern": ("attention.kernel.weights", AS_IS),
    "attn.hook_z": ("attention.kernel", PER_HEAD),
    "mlp.hook_pre_linear": ("feed_forward.up_proj", AS_IS),
    "mlp.hook_post": ("feed_forward.down_proj.x", AS_IS),
}


def resolve(decoder: Decoder, name: str) -> tuple[str, View]:
    """Our name of a tensor, and the layout in which `name` shows it.

    Names that are not TransformerLens's are returned unchanged.
    """
    if "hook_" not in name:
        return name, AS_IS
    if name in _WHOLE:
        return _WHOLE[name], AS_IS
    found = re.fullmatch(r"blocks\.(\d+|\*)\.(.+)", name)
    if found is None:
        return name, AS_IS
    layer, rest = found.groups()
    block = decoder.layers[0 if layer == "*" else min(int(layer), len(decoder.layers) - 1)]
    own, view = _in_layer(block, rest)
    return f"layers.{layer}.{own}".rstrip("."), view


def _in_layer(block: Any, rest: str) -> tuple[str, View]:
    if rest in ("attn.hook_q", "attn.hook_k"):
        letter = rest[-1]
        heads = block.attention.n_heads if letter == "q" else block.attention.n_kv_heads
        split = View(lambda x: x.unflatten(-1, (heads, -1)), lambda x: x.flatten(2))
        return f"attention.{letter}_proj", split
    if rest == "mlp.hook_pre":
        gated = hasattr(block.feed_forward, "gate_proj")
        return f"feed_forward.{'gate' if gated else 'up'}_proj", AS_IS
    if hasattr(block, "norm") and rest in ("ln1.hook_normalized", "ln2.hook_normalized"):
        return "norm", AS_IS
    return _LAYER.get(rest, (rest, AS_IS))
