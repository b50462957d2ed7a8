"""Published models as data: one file per family, every preset with its source.

    from workhorse.models import preset
    decoder = preset("gpt2").build()          # random weights

The names are known without torch; a family's file is imported when one of its presets is asked for.
"""

import importlib
from typing import TYPE_CHECKING

from workhorse.config import nearest
from workhorse.errors import WorkhorseError
from workhorse.models.preset import Preset

if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

__all__ = ["FAMILIES", "Preset", "find_preset", "preset", "preset_names", "presets"]

FAMILIES: dict[str, tuple[str, ...]] = {
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
    "mpt": ("mpt-7b", "mpt-30b"),
}
"""The presets of each family; `workhorse.models.<family>` defines them in `PRESETS`."""


def preset_names() -> list[str]:
    """Every preset's name, by family. Imports no torch."""
    return [name for names in FAMILIES.values() for name in names]


def preset(name: str) -> "DecoderConfig":
    """The config of a published model.

    Raises:
        WorkhorseError: there is no preset of that name.
    """
    return find_preset(name).config


def find_preset(name: str) -> Preset:
    """A published model with its parameter count, source and notes.

    Raises:
        WorkhorseError: there is no preset of that name.
    """
    for family, names in FAMILIES.items():
        if name in names:
            return _family(family)[name]
    raise WorkhorseError(f"no preset {name!r}; {nearest(name, preset_names())}")


def presets() -> dict[str, Preset]:
    """Every preset by its name. Their configs are built when looked at."""
    return {name: found for family in FAMILIES for name, found in _family(family).items()}


def _family(family: str) -> dict[str, Preset]:
    module = importlib.import_module(f"workhorse.models.{family}")
    found: tuple[Preset, ...] = module.PRESETS
    return {preset.name: preset for preset in found}
