"""Published models as data: one file per family, every preset with its source.

    from workhorse.models import preset
    decoder = preset("gpt2").build()          # random weights

Listing the names does not import torch. A family's file is imported when one of its presets is
used.
"""

import importlib
from typing import TYPE_CHECKING

from workhorse.errors import WorkhorseError, nearest
from workhorse.models.preset import Preset

if TYPE_CHECKING:
    from workhorse.nn import DecoderConfig

__all__ = ["FAMILIES", "Preset", "find_preset", "preset", "preset_names", "presets", "search"]

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
    "released.llama3": (
        "llama-3-8b",
        "llama-3-70b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "llama-3.1-405b",
        "llama-3.2-1b",
        "llama-3.2-3b",
        "llama-3.3-70b",
    ),
    "released.mistral": ("mistral-7b-v0.1", "mistral-7b-v0.3", "mixtral-8x7b", "mixtral-8x22b"),
    "released.qwen": (
        "qwen2.5-0.5b",
        "qwen2.5-1.5b",
        "qwen2.5-3b",
        "qwen2.5-7b",
        "qwen2.5-14b",
        "qwen2.5-32b",
        "qwen2.5-72b",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-14b",
        "qwen3-32b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
    ),
    "olmo": ("olmo-1b", "olmo-7b", "olmo-65b"),
    "released.olmo": (
        "olmo-2-1b",
        "olmo-2-7b",
        "olmo-2-13b",
        "olmo-2-32b",
        "olmo-3-7b",
        "olmo-3-32b",
        "olmoe-1b-7b",
    ),
    "falcon": ("falcon-7b", "falcon-40b", "falcon-180b"),
    "gemma": ("gemma-2b", "gemma-7b"),
    "released.gemma": (
        "gemma-2-2b",
        "gemma-2-9b",
        "gemma-2-27b",
        "gemma-3-270m",
        "gemma-3-1b",
        "gemma-3-4b",
        "gemma-3-12b",
        "gemma-3-27b",
    ),
    "released.phi": ("phi-1.5", "phi-2", "phi-3-mini-4k", "phi-3-medium-4k", "phi-4"),
    "released.smollm": ("smollm2-135m", "smollm2-360m", "smollm2-1.7b", "smollm3-3b"),
    "released.gpt_oss": ("gpt-oss-20b", "gpt-oss-120b"),
    "released.deepseek": ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"),
    "released.starcoder": ("starcoder2-3b", "starcoder2-7b"),
    "released.glm": ("glm-4-9b-chat",),
    "released.granite": ("granite-3.3-8b",),
    "palm": ("palm-8b", "palm-62b", "palm-540b"),
    "mpt": ("mpt-7b", "mpt-30b"),
    "released.pythia": (
        "pythia-70m",
        "pythia-160m",
        "pythia-410m",
        "pythia-1b",
        "pythia-1.4b",
        "pythia-2.8b",
        "pythia-6.9b",
        "pythia-12b",
        "gpt-neox-20b",
    ),
    "released.opt": (
        "opt-125m",
        "opt-350m",
        "opt-1.3b",
        "opt-2.7b",
        "opt-6.7b",
        "opt-13b",
        "opt-30b",
        "opt-66b",
    ),
    "released.bloom": (
        "bloom-560m",
        "bloom-1b1",
        "bloom-1b7",
        "bloom-3b",
        "bloom-7b1",
        "bloom-176b",
    ),
}
"""Preset names by family; `workhorse.models.families.<family>` defines them in `PRESETS`."""


def preset_names() -> list[str]:
    """Names of all presets, grouped by family. Does not import torch."""
    return [name for names in FAMILIES.values() for name in names]


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
    for family, names in FAMILIES.items():
        if name in names:
            return _family(family)[name]
    raise WorkhorseError(f"no preset {name!r}; {nearest(str(name), preset_names())}")


def presets() -> dict[str, Preset]:
    """All presets by name. Each config is built on first access."""
    return {name: found for family in FAMILIES for name, found in _family(family).items()}


def search(text: str = "") -> list[list[str]]:
    """Preset names that contain a string, grouped by family. Case is ignored.

    Does not import torch.

    Raises:
        WorkhorseError: no name contains the string.
    """
    groups = [[name for name in names if text.lower() in name] for names in FAMILIES.values()]
    groups = [names for names in groups if names]
    if not groups:
        raise WorkhorseError(f"no preset has {text!r} in its name; workhorse models list shows all")
    return groups


def _family(family: str) -> dict[str, Preset]:
    module = importlib.import_module(f"workhorse.models.families.{family}")
    found: tuple[Preset, ...] = module.PRESETS
    return {preset.name: preset for preset in found}
