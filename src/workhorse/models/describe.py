"""A preset as a row of a table, and as a page of its own."""

import textwrap
from typing import Any

from workhorse.models.huggingface import native_class
from workhorse.models.parameters import active_parameters, count_parameters
from workhorse.models.preset import UNITS, Preset
from workhorse.nn import DecoderConfig

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


def shape(config: DecoderConfig) -> dict[str, int]:
    """The sizes of a model; heads and widths are those of its first layer."""
    block = config.blocks[config.layer_names()[0]]
    return {
        "n_layers": config.n_layers,
        "d_model": config.d_model,
        "n_heads": block.attention.n_heads,
        "n_kv_heads": block.attention.n_kv_heads or block.attention.n_heads,
        "head_dim": block.attention.key_dim(config.d_model),
        "d_ff": block.feed_forward.d_ff,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
    }


def details(preset: Preset) -> dict[str, Any]:
    """Everything about a preset in plain data; `parameters` holds each component and the total."""
    return {
        "name": preset.name,
        "parameters": count_parameters(preset.config),
        "exactness": preset.exactness,
        "printed": preset.printed or None,
        "agrees": preset.agrees,
        "exports_as": exports_as(preset.config),
        "source": preset.source,
        "notes": list(preset.notes),
        "config": preset.config.to_dict(),
    }


def page(preset: Preset) -> str:
    """The config as YAML under comments that say the rest; `DecoderConfig.from_yaml` reads it."""
    counts = count_parameters(preset.config)
    lines = [f"{preset.name}: {counts['total']:,} parameters ({preset.exactness})"]
    lines += [f"  {part:<14}{counts[part]:>19,}" for part in counts if part != "total"]
    if preset.printed:
        verdict = "agrees" if preset.agrees else "does not agree; see the notes"
        lines.append(f"Printed: {preset.printed}, which {verdict}.")
    lines += textwrap.wrap(
        f"Exports as: {exports_as(preset.config)}.", WIDTH, subsequent_indent="  "
    )
    lines += textwrap.wrap(f"Source: {preset.source}.", WIDTH, subsequent_indent="  ")
    for note in preset.notes:
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ")
    return "\n".join(f"# {line}" for line in lines) + "\n" + preset.config.to_yaml()


def exports_as(config: DecoderConfig) -> str:
    """The class of transformers that can hold a model, or what is in the way of the nearest."""
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
