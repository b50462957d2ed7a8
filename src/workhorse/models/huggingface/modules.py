"""Names of a transformers model in memory, where they differ from the names in its files.

transformers 5 stacks the experts of a layer in memory: `experts.gate_up_proj`, with the rows of
gate before those of up, and `experts.down_proj`, both (experts, out_features, in_features). Some
modules also have another name in memory. Adapters (PEFT) use the names in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from workhorse.models.huggingface.family import Family
from workhorse.models.huggingface.moves import Rule, joined, same

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


def module_rules(family: Family) -> tuple[Rule, ...]:
    """The rules of a family for its model in memory, then the rules for its files."""
    return (*_in_memory(family), *family.rules)


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
