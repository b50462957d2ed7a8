"""The systems of the literature as rows of a table: `literature.yaml`, and the presets' configs."""

import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import yaml

from workhorse.errors import WorkhorseError, shown
from workhorse.models import LOADER, find_preset

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
System = dict[str, Any]  # an entry of literature.yaml, which describes the keys


def find_systems(text: str = "") -> list[System]:
    """Systems with this name or preset; if there is none, those with `text` in a name.

    A preset's system has only this preset. Case is ignored. Systems are in the order of their
    papers. Does not import torch.

    Raises:
        WorkhorseError: no name contains the text.
    """
    entries = Path(__file__).with_name("literature.yaml").read_text(encoding="utf-8")
    systems: list[System] = yaml.load(entries, LOADER)
    part = text.lower()
    for one in systems:
        if part in one["presets"]:
            return [{**one, "presets": [part]}]
        if part == one["name"].lower():
            return [one]
    found = [one for one in systems if part in " ".join([one["name"].lower(), *one["presets"]])]
    found = found or [one for one in systems if _letters(one["name"]) == _letters(text)]
    if not found:
        raise WorkhorseError(f"no system is named {shown(text)}; workhorse models table lists them")
    return found


def near_system(name: str) -> str:
    """Return the remedy for a model with the name of a system, such as GPT-4; empty if it is none.

    Does not import torch.
    """
    for one in find_systems():
        if _letters(one["name"]) == _letters(name):
            if presets := one["presets"]:
                return f"did you mean {presets[0]!r}?"
            return f"its shape is not published, see workhorse models table {one['name'].lower()}"
    return ""


def row(system: System) -> System:
    """Return an entry and the columns that follow from its configs, for all sizes together.

    Returns:
        The keys of `literature.yaml`, the aspects of `design`, `parameters` (and the active ones of
        a mixture of experts), `printed` (parameters in the source), `layers`, `d_model`, `heads`
        (of queries, and after a slash of keys and values if they are fewer), `vocabulary` and
        `context` (tokens). Counts of layers and heads are in the order of the presets. If words
        differ between sizes, each description follows the sizes that it is for.
    """
    from workhorse.models.describe import active_parameters, shape, short_count
    from workhorse.models.design import design

    names: list[str] = system["presets"]
    if not names:
        return system
    found = [find_preset(name) for name in names]
    configs = [preset.config for preset in found]
    counts = _span([preset.parameters for preset in found], short_count)
    active = _span([active_parameters(config) for config in configs], short_count)
    cut = commonprefix(names).rfind("-") + 1  # noqa: RUF071 - of characters
    sizes = [name[cut:] for name in names]
    designs = [design(config) for config in configs]
    shapes = [shape(config) for config in configs]
    return {
        **system,
        "parameters": counts if active == counts else f"{counts}, {active} active",
        "printed": "–".join(dict.fromkeys((found[0].printed, found[-1].printed))),
        "layers": _listed([f"{one['n_layers']}" for one in shapes]),
        "d_model": _listed([f"{one['d_model']}" for one in shapes]),
        "heads": _listed(
            [
                "/".join(dict.fromkeys((f"{one['n_heads']}", f"{one['n_kv_heads']}")))
                for one in shapes
            ]
        ),
        **{aspect: merged([one[aspect] for one in designs], sizes) for aspect in designs[0]},
        "vocabulary": _span([config.vocab_size for config in configs]),
        "context": _span([config.max_seq_len for config in configs]),
    }


def merged(values: Sequence[str], sizes: Sequence[str]) -> str:
    """Merge one description per size: ranges of numbers, and the sizes if words differ."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(NUMBER.sub("{}", value), []).append(index)
    parts: list[str] = []
    for words, members in groups.items():
        numbers = zip(*(NUMBER.findall(values[index]) for index in members), strict=True)
        named = ", ".join(sizes[index] for index in members)
        text = words.format(*map(_range, numbers))
        parts.append(text if len(groups) == 1 else f"{named}: {text or 'none'}")
    return "; ".join(parts)


def _range(numbers: Sequence[str]) -> str:
    found = sorted(set(numbers), key=lambda number: float(number.replace(",", "")))
    return " or ".join(found) if len(found) <= 2 else f"{found[0]}–{found[-1]}"  # noqa: PLR2004


def _span(counts: Sequence[int], shown: Callable[[int], str] = "{:,}".format) -> str:
    return "–".join(dict.fromkeys((shown(min(counts)), shown(max(counts)))))


def _listed(counts: Sequence[str]) -> str:
    return ", ".join(counts) if len(set(counts)) > 1 else counts[0]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
