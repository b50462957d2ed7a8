"""Published models as data, every preset with its source.

    from workhorse.models import preset
    decoder = preset("gpt2").build()          # random weights

Listing the names does not import torch. `released.yaml` has the models whose `config.json` is
published; the file of another family is imported when one of its presets is used.
"""

import importlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from workhorse.errors import WorkhorseError, nearest
from workhorse.models.preset import Preset

if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

__all__ = ["Preset", "find_preset", "preset", "preset_names", "presets", "search"]

WRITTEN: dict[str, tuple[str, ...]] = {
    "gpt": ("gpt",),
    "gpt2": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "gpt3": (
        "gpt3-125m",
        "gpt3-350m",
        "gpt3-760m",
        "gpt3-1.3b",
        "gpt3-2.7b",
        "gpt3-6.7b",
        "gpt3-13b",
        "gpt3-175b",
    ),
    "transformer2017": ("transformer-2017", "transformer-2017-big"),
    "llama": ("llama-7b", "llama-13b", "llama-30b", "llama-65b"),
    "llama2": ("llama-2-7b", "llama-2-13b", "llama-2-34b", "llama-2-70b"),
    "olmo": ("olmo-1b", "olmo-7b", "olmo-65b"),
    "falcon": ("falcon-7b", "falcon-40b", "falcon-180b"),
    "gemma": ("gemma-2b", "gemma-7b"),
    "palm": ("palm-8b", "palm-62b", "palm-540b"),
    "mpt": ("mpt-7b", "mpt-7b-storywriter", "mpt-30b"),
}
"""Names of the presets in `PRESETS` of each module `workhorse.models.families.<family>`."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, which is much faster, if PyYAML was built with libyaml."""


@cache
def released() -> list[dict[str, Preset]]:
    """The presets of models whose `config.json` is published, grouped by source."""
    text = (Path(__file__).parent / "released.yaml").read_text(encoding="utf-8")
    return [_group(**release) for release in yaml.load(text, LOADER)]


def _group(
    model_type: str,
    source: str,
    sizes: dict[str, dict[str, Any]],
    exactness: Literal["released", "derived"] = "released",
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for name, size in sizes.items():
        fields: dict[str, Any] = {"model_type": model_type, **shared, **size}
        parameters, printed = fields.pop("parameters"), fields.pop("printed")
        notes = tuple(fields.pop("notes", ()))
        make = partial(_read, fields)
        found[name] = Preset(name, make, parameters, exactness, source, printed, notes, fields)
    return found


def _read(fields: dict[str, Any]) -> "DecoderConfig":
    from workhorse.models.huggingface import Fields, family

    return family(fields["model_type"]).read(Fields(fields))


def _written(family: str) -> dict[str, Preset]:
    module = importlib.import_module(f"workhorse.models.families.{family}")
    found: tuple[Preset, ...] = module.PRESETS
    return {preset.name: preset for preset in found}


def groups() -> list[list[str]]:
    """Preset names, grouped by family or source. Does not import torch."""
    return [[*names] for names in (*WRITTEN.values(), *released())]


def preset_names() -> list[str]:
    """Names of all presets. Does not import torch."""
    return [name for names in groups() for name in names]


def preset(name: str) -> "DecoderConfig":
    """The config of a published model.

    Raises:
        WorkhorseError: no preset has that name.
    """
    return find_preset(name).config


def find_preset(name: str) -> Preset:
    """A published model with its parameter count, source and notes.

    Raises:
        WorkhorseError: no preset has that name.
    """
    for group in released():
        if str(name) in group:
            return group[str(name)]
    for family, names in WRITTEN.items():
        if name in names:
            return _written(family)[name]
    raise WorkhorseError(f"no preset {name!r}; {nearest(str(name), preset_names())}")


def presets() -> dict[str, Preset]:
    """All presets by name. Each config is built on first access."""
    found = [*map(_written, WRITTEN), *released()]
    return {name: preset for group in found for name, preset in group.items()}


def search(text: str = "") -> list[list[str]]:
    """Preset names that contain a string, grouped like `groups`. Case is ignored.

    Does not import torch.

    Raises:
        WorkhorseError: no name contains the string.
    """
    found = [[name for name in names if text.lower() in name] for names in groups()]
    found = [names for names in found if names]
    if not found:
        raise WorkhorseError(f"no preset has {text!r} in its name; workhorse models list shows all")
    return found
