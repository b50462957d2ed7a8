"""The model types of Hugging Face transformers that are supported.

    from workhorse.models.huggingface import family
    family("llama").read(Fields(json.loads(text)))      # -> DecoderConfig

A model type's file is imported when it is needed.
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from functools import cache

from workhorse.errors import WorkhorseError, nearest
from workhorse.models.huggingface.family import IMPOSSIBLE, Family
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.other_kinds import other_kind
from workhorse.nn import DecoderConfig

__all__ = [
    "MODEL_TYPES",
    "Family",
    "Fields",
    "families",
    "family",
    "in_the_way",
    "native_class",
    "nearest_of",
]

MODULES: dict[str, tuple[str, ...]] = {
    "llama": ("llama",),
    "qwen": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    "mistral": ("mistral", "mixtral", "ministral3"),
    "gemma": ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
    "gpt2": ("gpt2",),
    "phi": ("phi", "phi3", "phimoe"),
    "gpt_oss": ("gpt_oss",),
    "deepseek": ("deepseek_v2", "deepseek_v3"),
    "olmo": ("olmo", "olmo2", "olmo3", "olmoe"),
    "llama4": ("llama4_text",),
    "smollm3": ("smollm3",),
    "gpt_neox": ("gpt_neox", "gpt_neox_japanese"),
    "gpt_j": ("gptj", "codegen"),
    "gpt_neo": ("gpt_neo",),
    "falcon": ("falcon",),
    "mpt": ("mpt",),
    "gpt": ("openai-gpt",),
    "bloom": ("bloom",),
    "opt": ("opt",),
    "starcoder": ("gpt_bigcode", "starcoder2"),
    "stablelm": ("stablelm",),
    "cohere": ("cohere", "cohere2"),
    "glm": ("glm", "glm4", "glm4_moe"),
    "granite": ("granite", "granitemoe", "granitemoeshared"),
    "exaone": ("exaone4",),
    "nemotron": ("nemotron",),
    "persimmon": ("persimmon",),
    "dbrx": ("dbrx",),
    "dots1": ("dots1",),
    "ernie": ("ernie4_5", "ernie4_5_moe"),
    "hunyuan": ("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    "helium": ("helium",),
    "arcee": ("arcee",),
    "apertus": ("apertus",),
    "seed_oss": ("seed_oss",),
    "minimax": ("minimax_m2",),
    "biogpt": ("biogpt",),
    "xglm": ("xglm",),
    "ctrl": ("ctrl",),
    "jais2": ("jais2",),
    "nanochat": ("nanochat",),
    "afmoe": ("afmoe",),
    "youtu": ("youtu",),
    "cwm": ("cwm",),
    "internlm3": ("internlm3",),
    "iquestcoder": ("iquestcoder",),
    "modernbert": ("modernbert-decoder",),
    "ministral": ("ministral",),
    "exaone_moe": ("exaone_moe",),
    "solar_open": ("solar_open",),
    "flex_olmo": ("flex_olmo",),
    "glm4_moe_lite": ("glm4_moe_lite",),
    "mellum": ("mellum",),
    "granite_swa": ("granite_swa", "granitemoe_swa"),
    "hyperclovax": ("hyperclovax",),
    "minicpm3": ("minicpm3",),
    "flint": ("flint",),
    "cohere2_moe": ("cohere2_moe",),
    "bitnet": ("bitnet",),
    "aria": ("aria_text",),
    "cohere_compass": ("cohere_compass_text",),
    "axk1": ("axk1",),
    "kolibri1": ("kolibri1",),
}
"""The model types in each module of `workhorse.models`, the most used first."""

KIND = 4
"""This many different numbers count as much as one different kind of part."""
_WHOLE = re.compile(r"layers\.\d+\.(attention\.)?kind is")
MODEL_TYPES = {name: module for module, names in MODULES.items() for name in names}


@cache
def family(model_type: str) -> Family:
    """The family of that `model_type`.

    Raises:
        WorkhorseError: it is not one of `MODEL_TYPES`.
    """
    if model_type not in MODEL_TYPES:
        name = model_type[:60]  # a stranger's, and the search for the nearest takes its time
        if kind := other_kind(name):
            raise WorkhorseError(
                f"model type {name!r} is not supported, since it is {kind}; workhorse models list "
                "has the decoder-only transformers that are"
            )
        raise WorkhorseError(f"model type {name!r} is not supported; {nearest(name, MODEL_TYPES)}")
    module = importlib.import_module(f"workhorse.models.families.{MODEL_TYPES[model_type]}")
    found: tuple[Family, ...] = module.HUGGING_FACE
    return {one.model_type: one for one in found}[model_type]


def families() -> Iterator[Family]:
    """Every family, the most used first, each imported when it is reached."""
    return map(family, MODEL_TYPES)


def native_class(config: DecoderConfig) -> Family | str:
    """The first family that can express a config, or one equivalent to it.

    A dense model is a mixture's only if no dense family can express it. If there is no family at
    all: the nearest, and everything in the config that it cannot express.
    """
    is_dense = all(one.feed_forward.kind != "moe" for one in config.blocks.values())
    found: dict[str, list[str]] = {}
    for mixtures in (False, True) if is_dense else (None,):
        tried = [one for one in families() if mixtures in (one.is_mixture, None)]
        for one in tried:
            found[one.architecture] = one.differences(config)
            if not found[one.architecture]:
                return one
        for one in tried:
            if one.equivalent(config) is not None:
                return one
    return nearest_of(found.items(), config)


def nearest_of(found: Iterable[tuple[str, list[str]]], config: DecoderConfig) -> str:
    """The nearest of the families that cannot express a config, and all differences.

    Args:
        found: names, each with the differences from `Family.differences`.
        config: what they cannot express.
    """
    name, differences = min(found, key=lambda one: _distance(one[1]))
    return f"{name}: {in_the_way(differences, config)}"


def in_the_way(differences: Iterable[str], config: DecoderConfig) -> str:
    """Differences in one line; those of layers with the same block only once."""
    return "; ".join(dict.fromkeys(_in_recipe(one, config) for one in differences))


def _in_recipe(difference: str, config: DecoderConfig) -> str:
    """A difference with its field named as in a recipe, where blocks have names."""
    if difference.startswith(IMPOSSIBLE):
        return difference
    names = config.layer_names()
    return "model." + re.sub(
        r"^layers\.(\d+)", lambda layer: f"blocks.{names[int(layer[1])]}", difference
    )


def _distance(differences: list[str]) -> tuple[bool, int]:
    """How far a family is from a config.

    Breaking a family's own rules counts most, since nothing could then be compared. A part too many
    or too few counts more than another kind of part, and that more than another number, because
    each hides further differences; another kind of block or attention hides the most.
    """
    kinds = sum(".kind is" in difference for difference in differences)
    parts = sum(" given" in difference for difference in differences)
    wholes = sum(bool(_WHOLE.match(difference)) for difference in differences)
    return differences[0].startswith(IMPOSSIBLE), len(differences) + KIND * (
        kinds + 2 * parts + 3 * wholes
    )
