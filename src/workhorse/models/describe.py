"""Descriptions of models: a preset as a row of a table, any model as a page."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from workhorse.models.huggingface import native_class
from workhorse.models.parameters import active_parameters, count_parameters
from workhorse.models.preset import UNITS, Preset
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import WiringConfig

WIDTH = 96


def summary(preset: Preset) -> dict[str, Any]:
    """A preset as a row of a table, in plain data."""
    return {
        "name": preset.name,
        "parameters": preset.parameters,
        "active_parameters": active_parameters(preset.config),
        "printed": preset.printed or None,
        **shape(preset.config),
    }


def shape(config: DecoderConfig) -> dict[str, int | None]:
    """The sizes of a model; heads and widths are those of its first layer.

    Those of a mixture are of the first one, None if there is none.
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
    """Everything about a preset in plain data."""
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
    """The properties of a model that follow from its config, with `parameters` by component.

    Args:
        name: of the model.
        kind: the kind of model on disk, in words.
        config: the decoder's.
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
    """The result of `details` or `describe` as comments above the config in YAML.

    `DecoderConfig.from_yaml` reads it.
    """
    counts, active = found["parameters"], found["active_parameters"]
    exactness = f" ({found['exactness']})" if "exactness" in found else ""
    lines = [f"{found['name']}: {counts['total']:,} parameters{exactness}"]
    lines += [f"  {part:<14}{counts[part]:>19,}" for part in counts if part != "total"]
    if active != counts["total"]:
        lines.append(f"At work on a token: {active:,} parameters.")
    config = DecoderConfig.from_dict(found["config"])
    for sentence in _sentences(found, config):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    comments = "\n".join(f"# {line}" for line in lines)
    return f"{comments}\n{config.to_yaml()}"


def _sentences(found: Mapping[str, Any], config: DecoderConfig) -> Iterator[str]:
    """Everything except the counts, a line each."""
    if found.get("printed"):
        verdict = "agrees" if found["agrees"] else "does not agree; see the notes"
        yield f"Printed: {found['printed']}, which {verdict}."
    yield from _shape(config)
    yield from found.get("stored", ())
    yield f"Exports as: {found['exports_as']}."
    if "source" in found:
        yield f"Source: {found['source']}."
    yield from (f"- {note}" for note in found["notes"])


def _shape(config: DecoderConfig) -> Iterator[str]:
    """The sizes of a model; where its layers differ, those of each kind of layer."""
    width = f"{_layers(config.n_layers)} of width {config.d_model}"
    ends = f"vocabulary {config.vocab_size:,}, texts of up to {config.max_seq_len:,} tokens"
    if len(config.blocks) == 1:
        (block,) = config.blocks.values()
        heads, feed_forward = _heads(block, config.d_model), _feed_forward(block)
        yield f"Shape: {width}, {heads}, {feed_forward}, {ends}."
        return
    yield f"Shape: {width}, {ends}, with"
    names = config.layer_names()
    for name, block in config.blocks.items():
        count = names.count(name)
        parts = [_heads(block, config.d_model), *_sees(block), _feed_forward(block)]
        yield f"- {_layers(count)} `{name}`: {', '.join(parts)}."


def _layers(count: int) -> str:
    return f"{count} {'layer' if count == 1 else 'layers'}"


def _heads(block: WiringConfig, d_model: int) -> str:
    attention = block.attention
    shared = attention.n_kv_heads or attention.n_heads
    grouped = f" over {shared} of keys and values" if shared != attention.n_heads else ""
    return f"{attention.n_heads} heads of {attention.key_dim(d_model)}{grouped}"


def _sees(block: WiringConfig) -> Iterator[str]:
    """How far a layer's attention sees, and its kind of position."""
    attention = block.attention
    if attention.window or attention.chunk:
        yield f"window {attention.window}" if attention.window else f"chunk {attention.chunk}"
    else:
        yield "the whole text"
    yield f"position {attention.position.kind}"


def _feed_forward(block: WiringConfig) -> str:
    if mixture := block.mixture:
        return f"{mixture.top_k} of {mixture.n_experts} experts of {mixture.d_ff}"
    return f"feed-forward {block.feed_forward.d_ff}"


def exports_as(config: DecoderConfig) -> str:
    """The class of transformers that can hold a model, or the differences from the nearest."""
    found = native_class(config)
    if isinstance(found, str):
        return f"no native class of transformers; nearest is {found}"
    return found.architecture


def short_count(parameters: int) -> str:
    """A count in three digits: 124M, 6.74B, 540B."""
    unit = "B" if parameters >= UNITS["B"] else "M"
    number = parameters / UNITS[unit]
    decimals = max(3 - len(str(int(number))), 0)
    return f"{number:.{decimals}f}{unit}"
