"""Published models as data, every preset with its source.

    from workhorse.models import preset
    decoder = preset("gpt2").build()          # random weights

Listing the names does not import torch. `released.yaml` has models with the fields of their
`config.json`, `built.yaml` models that a function in `families/` builds.
"""

import importlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from workhorse.errors import WorkhorseError, nearest
from workhorse.models.preset import Preset

if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

__all__ = ["Preset", "find_preset", "preset", "preset_names", "presets", "search"]

FILES = ("built", "released")
ABOUT = ("parameters", "exactness", "source", "printed", "notes")
"""The fields of a size that describe it, as in `Preset`. All others determine its config."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, which is much faster, if PyYAML was built with libyaml."""


@cache
def _groups() -> list[dict[str, Preset]]:
    """All presets, grouped by source."""
    texts = ((Path(__file__).parent / f"{name}.yaml").read_text("utf-8") for name in FILES)
    return [_group(**group) for text in texts for group in yaml.load(text, LOADER)]


def _group(
    source: str,
    sizes: dict[str, dict[str, Any]],
    *,
    model_type: str = "",
    builder: str = "",
    exactness: str = "released",
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Preset]:
    """The presets of one source: of `model_type`, or built by a function named `builder`."""
    found: dict[str, Preset] = {}
    for name, size in sizes.items():
        fields: dict[str, Any] = {"source": source, "exactness": exactness, **shared, **size}
        about = {key: fields.pop(key) for key in ABOUT if key in fields}
        about["notes"] = tuple(about.get("notes", ()))
        if builder:
            found[name] = Preset(name, partial(_build, builder, fields), **about)
        else:
            fields = {"model_type": model_type, **fields}
            found[name] = Preset(name, partial(_read, fields), released=fields, **about)
    return found


def _build(builder: str, arguments: dict[str, Any]) -> "DecoderConfig":
    module = importlib.import_module(f"workhorse.models.families.{builder}")
    return getattr(module, builder)(**arguments)


def _read(fields: dict[str, Any]) -> "DecoderConfig":
    from workhorse.models.huggingface import Fields, family

    return family(fields["model_type"]).read(Fields(fields))


def groups() -> list[list[str]]:
    """Preset names, grouped by family or source. Does not import torch."""
    return [[*group] for group in _groups()]


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
    if found := presets().get(str(name)):
        return found
    raise WorkhorseError(f"no preset {name!r}; {nearest(str(name), preset_names())}")


def presets() -> dict[str, Preset]:
    """All presets by name. Each config is built on first access."""
    return {name: preset for group in _groups() for name, preset in group.items()}


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
