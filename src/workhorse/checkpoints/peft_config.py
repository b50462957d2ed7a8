"""`adapter_config.json` of PEFT 0.21, and the names of modules in it."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from workhorse.checkpoints.huggingface.load import ADAPTER_FILE
from workhorse.checkpoints.low_rank import Update
from workhorse.config.base import Config, ConfigError
from workhorse.config.errors import as_written
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import read_json
from workhorse.transforms.lora import LoraConfig, ends_with

Value = TypeVar("Value")

NO_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(("auto_mapping", "eva_config", "exclude_modules", "layers_pattern")),
    **dict.fromkeys(("layers_to_transform", "megatron_config", "revision")),
    "fan_in_fan_out": False,
    "inference_mode": True,
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "target_modules": [],
}
"""Keys without effect on the result of a saved adapter, with PEFT's defaults. The tensors show
which layers have an adapter."""
UNSUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "corda_config", "kasa_config")),
    **dict.fromkeys(("layer_replication", "lora_ga_config", "monteclora_config", "use_bdlora")),
    **dict.fromkeys(("trainable_token_indices", "velora_config")),
    "lora_bias": False,
    "use_qalora": False,
}
"""Keys that must have PEFT's defaults."""


class PeftConfig(Config):
    """The keys of `adapter_config.json` that are read."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, gt=0)
    lora_alpha: int | float = Field(default=8, gt=0)
    rank_pattern: dict[str, int] = Field(default={})
    alpha_pattern: dict[str, int | float] = Field(default={})
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True
    """Others than these change the weights of the base."""
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None


def read_config(path: Path) -> PeftConfig:
    """Read `adapter_config.json`.

    Raises:
        WorkhorseError: the file is missing or damaged, or an option is not supported.
    """
    given = read_json(path)
    fields = {key: value for key, value in given.items() if key in PeftConfig.model_fields}
    for key in given.keys() - fields.keys() - NO_EFFECT.keys():
        if given[key]:
            raise WorkhorseError(
                f"{path}: {key}={as_written(given[key])} is not supported; merge the adapter with "
                "PEFT's merge_and_unload"
            )
    try:
        return PeftConfig(**fields)
    except ConfigError as error:
        raise WorkhorseError(f"{path}: {error}") from None


def written_config(
    config: LoraConfig, updates: Mapping[str, Update], saved: Iterable[str], every: list[str]
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Args:
        config: the options of the adapter.
        updates: the updates, by the names of their weights.
        saved: the names of the weights that are saved in full.
        every: the names of all modules.
    """
    every = [*every, *updates]
    named = {one.removesuffix(".weight"): update for one, update in updates.items()}
    alphas = {one: _plain(update.alpha) for one, update in named.items()}
    parameters = shortest([one for one in named if one in updates], every)
    modules = [one.rpartition(".")[0] for one in saved]
    written = PeftConfig(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=_plain(config.alpha),
        rank_pattern=pattern({one: named[one].rank for one in named}, config.rank, every),
        alpha_pattern=pattern(alphas, _plain(config.alpha), every),
        lora_dropout=config.dropout,
        use_rslora=config.scaling == "sqrt_rank",
        use_dora=config.dora,
        modules_to_save=shortest(modules, every, str.endswith) or None,
        target_parameters=sorted(parameters) or None,
    )
    targets = sorted(shortest([one for one in named if one not in updates], every))
    return {**NO_EFFECT, **UNSUPPORTED, **written.to_dict(), "target_modules": targets}


def modules_of(weights: Iterable[str]) -> list[str]:
    """The names of the modules that contain weights, directly or not."""
    parts = (name.split(".") for name in weights)
    return list(dict.fromkeys(".".join(one[:n]) for one in parts for n in range(1, len(one))))


def shortest(
    chosen: Iterable[str], every: Iterable[str], fits: Callable[[str, str], bool] = ends_with
) -> list[str]:
    """The shortest ends that fit the chosen names, and no other of `every`."""
    wanted = dict.fromkeys(chosen)
    others = [one for one in every if one not in wanted]
    found: list[str] = []
    for name in wanted:
        if not any(fits(name, end) for end in found):
            parts = name.split(".")
            ends = (".".join(parts[n:]) for n in reversed(range(len(parts))))
            found.append(next(end for end in ends if not any(fits(one, end) for one in others)))
    return found


def pattern(values: Mapping[str, Value], default: Value, every: Iterable[str]) -> dict[str, Value]:
    """The values that differ from the default, by the shortest ends of names."""
    others = dict.fromkeys(one for one in values.values() if one != default)
    return {
        end: value
        for value in others
        for end in shortest([name for name, one in values.items() if one == value], every)
    }


def matching(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    """The value of the first pattern, a regular expression, that fits the end of a name."""
    try:
        fits = (one for end, one in patterns.items() if re.match(rf"(.*\.)?({end})$", name))
        return next(fits, default)
    except re.error as error:
        raise WorkhorseError(f"a pattern of {ADAPTER_FILE} is not valid: {error}") from None


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
