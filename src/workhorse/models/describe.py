"""Describes a model: its sizes, and the parameters and FLOPs of each component."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, cast

from torch import Tensor, nn

from workhorse.models.design import in_one_line, reach
from workhorse.models.huggingface import native_class
from workhorse.models.preset import UNITS, Preset
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.blocks import Block, BlockConfig, WiringConfig
from workhorse.nn.facts import linear_layers
from workhorse.nn.norms import norm_facts

FLOPS_PER_PARAMETER = 6
"""Training FLOPs per parameter and token: 2 in the forward pass, 4 in the backward pass."""
SCORES = "scores"
"""Component name of the matmuls of queries with keys and of attention weights with values."""


def forward_flops(decoder: Decoder, seq_len: int) -> dict[str, int]:
    """Floating-point operations of the forward pass per token, by component.

    Each weight of a matmul counts 2 operations; of the experts, only `top_k` count. Each layer adds
    `2 · heads · (head_dim + value_dim) · keys` for attention scores and outputs. `keys` is
    `seq_len`, or the window or chunk if that is smaller. Keys hidden by the causal mask count, as
    in PaLM (2204.02311 appendix B); keys hidden by a window do not. Look-ups, norms, activations,
    short convolutions and the softmax do not count. PyTorch's FLOP counter gives the same result,
    except for windows and chunks.

    Args:
        decoder: the decoder, on any device including `meta`.
        seq_len: sequence length in tokens.

    Returns:
        The operations of `embedding` (its projections), `attention` (its projections), `scores`,
        `feed_forward` and `head`. Components without operations are omitted.
    """
    flops: Counter[str] = Counter()
    for path, linear, share in linear_layers(decoder):
        parts = path.split(".")
        component = parts[2] if parts[0] == "layers" else parts[0]
        flops[component] += int(2 * share * linear.shape.numel())
    for block in decoder.layers:
        attention = cast(Block, block).attention
        keys = min(seq_len, attention.pattern.reach or seq_len)
        flops[SCORES] += 2 * attention.n_heads * (attention.head_dim + attention.value_dim) * keys
    return dict(flops)


def flops_per_token(decoder: Decoder, seq_len: int, *, frozen: bool = False) -> int:
    """Floating-point operations of training per token: three times the sum of `forward_flops`.

    The backward pass needs twice the operations of the forward pass. Recomputation and the
    optimizer do not count.

    Args:
        decoder: the decoder without adapter.
        seq_len: sequence length in tokens.
        frozen: True if an adapter is trained: gradients of the weights are then not computed, so
            their matmuls count twice. The adapter's own matmuls do not count.
    """
    flops = forward_flops(decoder, seq_len)
    weights = sum(flops.values()) - flops.get(SCORES, 0)
    return 3 * sum(flops.values()) - (weights if frozen else 0)


def recomputed_flops(decoder: Decoder, seq_len: int) -> int:
    """Floating-point operations per token that activation checkpointing repeats, in the layers."""
    flops = forward_flops(decoder, seq_len)
    return sum(flops.values()) - flops.get("head", 0) - flops.get("embedding", 0)


COMPONENTS = ("embedding", "attention", "feed_forward", "norms", "head")
EXPERTS = ["feed_forward", "experts"]
"""Path of the routed experts inside a layer."""


def count_parameters(config: DecoderConfig) -> dict[str, int]:
    """Number of parameters of each of `COMPONENTS`, and their `total`.

    `embedding` counts token vectors and learned positions. `norms` counts all norms of the model.
    `head` counts only parameters not shared with the embedding: a tied matrix is counted once.
    """
    counts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for path, owner, _, number in _parameters(config):
        counts[_component(path, owner)] += number
    return {**counts, "total": sum(counts.values())}


def active_parameters(config: DecoderConfig) -> int:
    """Number of parameters active per token: only `top_k` of a mixture's experts count.

    The whole embedding counts, although a token looks up only one row.
    """
    total = Fraction(0)
    for path, _, block, number in _parameters(config):
        mixture = block.mixture if block and _is_of_experts(path) else None
        total += number * (mixture.used_share if mixture else 1)
    return int(total)


def components_of(decoder: Decoder) -> dict[str, str]:
    """Return the component of each parameter and buffer: one of `COMPONENTS`, or `experts`."""
    return {
        name: "experts" if _is_of_experts(path := name.split(".")) else _component(path, owner)
        for name in tensors_of(decoder)
        for owner in [decoder.get_submodule(name.rpartition(".")[0])]
    }


def tensors_of(decoder: Decoder) -> dict[str, Tensor]:
    """All parameters and buffers by name; a tied matrix has two names."""
    parameters = decoder.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(decoder.named_buffers())}


def _parameters(
    config: DecoderConfig,
) -> Iterator[tuple[list[str], nn.Module, BlockConfig | None, int]]:
    """Yield the parameters of a decoder, once for all layers of the same kind.

    Yields:
        path: parameter name, split at its dots.
        owner: module that holds the parameter.
        block: config of its layer; None outside the layers.
        number: element count times the number of layers of that kind.
    """
    layers = Counter(config.layer_names())
    kinds = tuple(layers)  # layers with the same name have the same size: build one of each
    decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(device="meta")
    for name, parameter in decoder.named_parameters():  # lists a tied matrix once, as embedding
        path = name.split(".")
        owner = decoder.get_submodule(".".join(path[:-1]))
        kind = kinds[int(path[1])] if path[0] == "layers" else None
        block = config.blocks[kind] if kind else None
        yield path, owner, block, parameter.numel() * (layers[kind] if kind else 1)


def _is_of_experts(path: list[str]) -> bool:
    return path[2:4] == EXPERTS


def _component(path: list[str], owner: nn.Module) -> str:
    """Return the component of a parameter, one of `COMPONENTS`."""
    if norm_facts(owner) is not None:
        return "norms"
    return path[2].removesuffix("_convolution") if path[0] == "layers" else path[0]


WIDTH = 96


def summary(preset: Preset) -> dict[str, Any]:
    """Return the sizes and parameter counts of a preset, as plain data for one table row."""
    return {
        "name": preset.name,
        "parameters": preset.parameters,
        "active_parameters": active_parameters(preset.config),
        "printed": preset.printed or None,
        **shape(preset.config),
    }


def shape(config: DecoderConfig) -> dict[str, int | None]:
    """Return the sizes of a model. Heads and widths are those of the first layer.

    Sizes of experts are those of the first mixture of experts; None if there is no mixture.
    """
    block, *_ = blocks = [config.blocks[name] for name in config.layer_names()]
    mixture = next((block.mixture for block in blocks if block.mixture), None)
    return {
        "n_layers": config.n_layers,
        "d_model": config.d_model,
        "n_heads": block.attention.n_heads,
        "n_kv_heads": block.attention.n_kv_heads or block.attention.n_heads,
        "head_dim": block.attention.key_dim(config.d_model),
        "d_ff": block.feed_forward.d_ff,
        "n_experts": mixture and mixture.n_experts,
        "top_k": mixture and mixture.top_k,
        "expert_d_ff": mixture and mixture.d_ff,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
    }


def details(preset: Preset) -> dict[str, Any]:
    """Return everything known about a preset, as plain data: sizes, source, notes and config."""
    return {
        **facts(preset.name, "preset", preset.config),
        "exactness": preset.exactness,
        "printed": preset.printed or None,
        "agrees": preset.agrees,
        "source": preset.source,
        "notes": list(preset.notes),
        "config": preset.config.to_dict(),
    }


def facts(name: str, kind: str, config: DecoderConfig) -> dict[str, Any]:
    """Return the properties of a model that follow from its config, as plain data.

    Args:
        name: name of the model.
        kind: what the name refers to, such as `preset` or a format on disk.
        config: config of the decoder.
    """
    return {
        "name": name,
        "kind": kind,
        "parameters": count_parameters(config),
        "active_parameters": active_parameters(config),
        "shape": shape(config),
        "exports_as": exports_as(config),
    }


def page(found: Mapping[str, Any]) -> str:
    """Format the result of `details` or `model.describe` as comments, then the config in YAML.

    `DecoderConfig.from_yaml` can read the result.
    """
    counts, active = found["parameters"], found["active_parameters"]
    exactness = f" ({found['exactness']})" if "exactness" in found else ""
    lines = [f"{found['name']}: {counts['total']:,} parameters{exactness}"]
    lines += [f"  {part:<14}{counts[part]:>19,}" for part in counts if part != "total"]
    if active != counts["total"]:
        lines.append(f"Active per token: {active:,} parameters.")
    config = DecoderConfig.from_dict(found["config"])
    for sentence in _sentences(found, config):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    comments = "\n".join(f"# {line}" for line in lines)
    return f"{comments}\n{config.to_yaml()}"


def _sentences(found: Mapping[str, Any], config: DecoderConfig) -> Iterator[str]:
    """Yield the lines of a model's page that follow the parameter counts."""
    if found.get("printed"):
        verdict = "agrees" if found["agrees"] else "does not agree; see the notes"
        yield f"Printed count: {found['printed']} ({verdict})."
    yield from _shape(config)
    yield f"Design: {in_one_line(config)}."
    yield from found.get("stored", ())
    yield f"Exports as: {found['exports_as']}."
    if "source" in found:
        yield f"Source: {found['source']}."
    yield from (f"- {note}" for note in found["notes"])


def _shape(config: DecoderConfig) -> Iterator[str]:
    """Yield lines about the sizes of a model; if its layers differ, a line for each kind."""
    width = f"{_layers(config.n_layers)} of width {config.d_model}"
    ends = f"vocabulary {config.vocab_size:,}, sequences of up to {config.max_seq_len:,} tokens"
    if len(config.blocks) == 1:
        (block,) = config.blocks.values()
        heads, feed_forward = _heads(block, config.d_model), _feed_forward(block)
        yield f"Shape: {width}, {heads}, {feed_forward}, {ends}."
        return
    yield f"Shape: {width}, {ends}, with"
    names = config.layer_names()
    for name, block in config.blocks.items():
        count = names.count(name)
        parts = _heads(block, config.d_model), reach(block) or "all keys", _feed_forward(block)
        yield f"- {_layers(count)} `{name}`: {', '.join(parts)}."


def _layers(count: int) -> str:
    return f"{count} {'layer' if count == 1 else 'layers'}"


def _heads(block: WiringConfig, d_model: int) -> str:
    attention = block.attention
    shared = attention.n_kv_heads or attention.n_heads
    grouped = f", {shared} key-value heads" if shared != attention.n_heads else ""
    return f"{attention.n_heads} heads of {attention.key_dim(d_model)}{grouped}"


def _feed_forward(block: WiringConfig) -> str:
    if mixture := block.mixture:
        return f"{mixture.top_k} of {mixture.n_experts} experts of {mixture.d_ff}"
    return f"feed-forward {block.feed_forward.d_ff}"


def exports_as(config: DecoderConfig) -> str:
    """Name the transformers class that can express a config, or the nearest and its differences."""
    found = native_class(config)
    if isinstance(found, str):
        return f"no native transformers class; nearest is {found}"
    return found.architecture


def short_count(parameters: int) -> str:
    """Format a count with three digits: 124M, 6.74B, 540B."""
    unit = "B" if parameters >= UNITS["B"] else "M"
    number = parameters / UNITS[unit]
    decimals = max(3 - len(str(int(number))), 0)
    return f"{number:.{decimals}f}{unit}"
