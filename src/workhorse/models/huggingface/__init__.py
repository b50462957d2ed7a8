"""Registry of the supported model types of Hugging Face transformers.

    from workhorse.models.huggingface import family
    family("llama").read(Fields(json.loads(text)))      # -> DecoderConfig

The module of a model type is imported on first use.
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from functools import cache

from workhorse.errors import WorkhorseError, nearest
from workhorse.models.huggingface.family import IMPOSSIBLE, Family, other_kind
from workhorse.models.huggingface.fields import Fields
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
"""Model types by module of `workhorse.models.families`, most used first."""

KIND = 4
"""Weight in `_distance` of a component of another kind, such as a norm; a value has weight 1."""
_WHOLE = re.compile(r"layers\.\d+\.(attention\.)?kind is")
MODEL_TYPES = {name: module for module, names in MODULES.items() for name in names}


@cache
def family(model_type: str) -> Family:
    """Return the family of a `model_type`.

    Raises:
        WorkhorseError: the type is not one of `MODEL_TYPES`.
    """
    if model_type not in MODEL_TYPES:
        name = model_type[:60]  # untrusted input: the search for near names is slow for long ones
        if kind := other_kind(name):
            raise WorkhorseError(
                f"model type {name!r} is not supported, because it is {kind}; "
                "workhorse models list shows the supported decoder-only transformers"
            )
        raise WorkhorseError(f"model type {name!r} is not supported; {nearest(name, MODEL_TYPES)}")
    module = importlib.import_module(f"workhorse.models.families.{MODEL_TYPES[model_type]}")
    found: tuple[Family, ...] = module.HUGGING_FACE
    return {one.model_type: one for one in found}[model_type]


def families() -> Iterator[Family]:
    """Iterate over all families, most used first; each is imported when it is reached."""
    return map(family, MODEL_TYPES)


def native_class(config: DecoderConfig) -> Family | str:
    """Return the first family that can express a config, or an equivalent config.

    For a dense model, families with mixtures of experts are tried last. If no family fits, the
    result is a string: the nearest transformers class and everything that it cannot express.
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
    """Describe the nearest of the families that cannot express a config, with all differences.

    Args:
        found: pairs of a class name and the result of `Family.differences`.
        config: the config that they cannot express.
    """
    name, differences = min(found, key=lambda one: _distance(one[1]))
    return f"{name}: {in_the_way(differences, config)}"


def in_the_way(differences: Iterable[str], config: DecoderConfig) -> str:
    """Join differences into one line; layers with the same block are listed once."""
    return "; ".join(dict.fromkeys(_in_recipe(one, config) for one in differences))


def _in_recipe(difference: str, config: DecoderConfig) -> str:
    """Rewrite a difference in terms of a recipe: `model.blocks.NAME` instead of `layers.INDEX`."""
    if difference.startswith(IMPOSSIBLE):
        return difference
    names = config.layer_names()
    return "model." + re.sub(
        r"^layers\.(\d+)", lambda layer: f"blocks.{names[int(layer[1])]}", difference
    )


def _distance(differences: list[str]) -> tuple[bool, int]:
    """Compute the distance of a family from a config, to find the nearest family.

    An invalid config counts most, because it hides all other differences. Another kind of block or
    attention is next. Then an extra or missing component, another kind of component, and a value.
    """
    kinds = sum(".kind is" in difference for difference in differences)
    parts = sum(" given" in difference for difference in differences)
    wholes = sum(bool(_WHOLE.match(difference)) for difference in differences)
    return differences[0].startswith(IMPOSSIBLE), len(differences) + KIND * (
        kinds + 2 * parts + 3 * wholes
    )
