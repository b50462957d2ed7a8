"""Names of a transformers model in memory that differ from the names in its files.

transformers 5 stacks the experts of a layer in memory: `experts.gate_up_proj`, with the rows of
gate first and of up second, and `experts.down_proj`, both (experts, out_features, in_features).
Some modules also have another name in memory. Adapters (PEFT) use the names in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from workhorse.errors import WorkhorseError
from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.moves import Move, Rule, Shape, Tensors, joined, plan, same
from workhorse.nn import DecoderConfig

EXPERTS = "layers.{i}.feed_forward.experts."
IN_MEMORY: Mapping[str, Mapping[str, str]] = {
    "axk1": {".post_mlp_layernorm": ".mlp.post_mlp_layernorm"},
    "gpt_neox": {"embed_out": "lm_head"},
    "granitemoe": {".router.layer": ".router"},
    "granitemoeshared": {".router.layer": ".router"},
    "hy_v3": {".mlp.router.gate": ".mlp.gate", ".shared_mlp": ".shared_experts"},
    "kolibri1": {
        ".post_attn_norm": ".post_self_attn_layernorm",
        ".post_ffn_norm": ".post_mlp_layernorm",
    },
    "minimax_m2": {".block_sparse_moe.": ".mlp."},
    "mixtral": {".block_sparse_moe.": ".mlp."},
    "phimoe": {".block_sparse_moe.gate": ".mlp.router", ".block_sparse_moe.": ".mlp."},
}
"""For each model type, parts of names in files, and the names in memory."""
STACKS: Mapping[str, str] = {
    ".experts.fc1": ".experts.gate_up_proj",
    ".experts.fc2": ".experts.down_proj",
    ".block_sparse_moe.input_linear": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear": ".block_sparse_moe.experts.down_proj",
}
"""Modules in files that are stacks of experts, and the names of the parameters in memory."""
TRANSPOSED_STACKS = ("aria_text", "gpt_oss")
"""Model types with classes that declare their stacks as (experts, in_features, out_features)."""


MATRIX = 2
PROBE = 1_000_003  # no matrix has this width


class Modules:
    """The weights of a decoder as a transformers model holds them in memory.

    Args:
        config: the config of the decoder.
        family: the model type of the transformers model.
        stored: names of weights, in memory or in files.

    Attributes:
        moves: for each of our weights, the weights in memory that hold it; with `stored`, then also
            the weights in files.
        shapes: the shapes of our weights.
    """

    def __init__(self, config: DecoderConfig, family: Family, stored: Sequence[str] = ()) -> None:
        weights = config.build(device="meta").named_parameters(remove_duplicate=False)
        self.shapes: dict[str, Shape] = {name: tuple(weight.shape) for name, weight in weights}
        rules = (*_in_memory(family), *family.rules)
        moves = plan(rules, self.shapes, config)
        if stored:
            moves += plan(family.rules, self.shapes, config, stored)
        self.moves = [move for move in moves if move.theirs]
        self.family = family

    def stored_shapes(self, move: Move) -> list[Shape]:
        """The shapes of the weights in memory."""
        empty = [torch.empty(self.shapes[name], device="meta") for name in move.ours]
        return [tuple(one.shape) for one in put(move, empty)]

    def layout(self, move: Move) -> tuple[bool, bool]:
        """How the matrices in memory are stored: True if transposed, and if that is not declared.

        Raises:
            WorkhorseError: the rows of their matrices are not rows of ours.
        """
        sizes = [(*self.shapes[name][:-1], PROBE) for name in move.ours]
        found = put(move, [torch.empty(size, device="meta") for size in sizes])
        n_dims = len(sizes[0]) - (len(found) > 1)  # one matrix for each expert
        if found[0].ndim != n_dims or PROBE not in found[0].shape[-2:]:
            raise WorkhorseError(
                f"{move.theirs[0]} of {self.family.model_type} has other rows than {move.ours[0]} "
                "and can have no adapter; remove it from the targets"
            )
        transposed = found[0].shape[-1] != PROBE
        declared = n_dims == MATRIX or self.family.model_type in TRANSPOSED_STACKS
        return transposed, transposed and not declared


def put(move: Move, tensors: Tensors) -> Tensors:
    """Convert tensors with the rows of our weights to tensors as they are in memory."""
    return move.rule.put(tensors, [tuple(one.shape) for one in tensors], move.block)


def _in_memory(family: Family) -> Iterator[Rule]:
    for rule in family.rules:
        if rule.ours[0] == EXPERTS + "gate_proj" and "{*}" in rule.theirs[0]:
            prefix = _renamed(family, rule.theirs[0].partition("{*}")[0])
            gate_up = (EXPERTS + "gate_proj.weight", EXPERTS + "up_proj.weight")
            yield joined(gate_up, prefix + "gate_up_proj", dim=1)
            yield same(EXPERTS + "down_proj.weight", prefix + "down_proj")
    for rule in family.rules:
        if not rule.theirs or "{*}" in rule.theirs[0]:
            continue
        for old, new in STACKS.items():
            if rule.theirs[0].endswith(old):
                theirs = rule.theirs[0].removesuffix(old) + new
                ours = tuple(f"{one}.weight" for one in rule.ours)
                yield replace(rule, ours=ours, theirs=(theirs,))
        theirs = tuple(_renamed(family, one) for one in rule.theirs)
        if theirs != rule.theirs:
            yield replace(rule, theirs=theirs)


def _renamed(family: Family, name: str) -> str:
    for old, new in IN_MEMORY.get(family.model_type, {}).items():
        name = name.replace(old, new)
    return name
