"""`adapter_config.json` of PEFT 0.21, and the names of modules in it."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from workhorse.checkpoints.low_rank import Update
from workhorse.config.base import Config, ConfigError
from workhorse.config.errors import as_written
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import read_json
from workhorse.transforms.lora import MAX_ALPHA, LoraConfig, ends_with

Value = TypeVar("Value")
Alpha = Annotated[int | float, Field(gt=0, le=MAX_ALPHA)]

NO_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(("auto_mapping", "corda_config", "eva_config", "lora_ga_config")),
    **dict.fromkeys(("layers_pattern", "megatron_config", "revision")),
    "fan_in_fan_out": False,
    "inference_mode": True,
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
}
"""Keys without effect on the result of a saved adapter, with PEFT's defaults."""
UNSUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config")),
    **dict.fromkeys(("layer_replication", "monteclora_config", "use_bdlora")),
    **dict.fromkeys(("trainable_token_indices", "velora_config")),
    "lora_bias": False,
    "use_qalora": False,
}
"""Keys that must have PEFT's defaults."""
NOT_MERGED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "use_qalora")
"""Keys of adapters that PEFT cannot merge."""
CONVERT = "save the adapter as LoRA, with path_initial_model_for_weight_conversion of PEFT"
MERGE = "merge the adapter with PEFT's merge_and_unload"
GIVE_NAMES = "give the names of layers"
CHANGE_THE_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""Beginnings of `init_lora_weights` with which PEFT changes the base."""
SIMPLE = re.compile(r"(?:[\w.^$|\\\[\]():?-]|(?<![)?*+])[*+])+", re.ASCII)
"""The regular expressions that are matched: they repeat no group. Others can take years, and files
of strangers can have them."""
MAX_CHOICES, MAX_LENGTH, MAX_PATTERNS = 4, 200, 20
"""Largest number of repetitions and groups of a pattern, its length, and the number of such
patterns. A match takes up to a millisecond then."""


class PeftConfig(Config):
    """The keys of `adapter_config.json` that are read."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, gt=0)
    lora_alpha: Alpha = 8
    rank_pattern: dict[str, Annotated[int, Field(gt=0)]] = Field(default={})
    alpha_pattern: dict[str, Alpha] = Field(default={})
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal", "mica"] = True
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None
    target_modules: str | list[str] | None = None
    """Only checked, since the tensors show which layers have an adapter."""
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None

    def targets(self) -> tuple[str, ...]:
        """Names of modules that all have an update. A regular expression is not matched."""
        names = () if isinstance(self.target_modules, str) else tuple(self.target_modules or ())
        return () if self.exclude_modules or self.layers_to_transform not in (None, []) else names


def read_config(path: Path) -> PeftConfig:
    """Read `adapter_config.json`.

    Raises:
        WorkhorseError: the file is missing or damaged, or an option is not supported.
    """
    given = read_json(path)
    fields = {key: value for key, value in given.items() if key in PeftConfig.model_fields}
    method = str(fields.get("init_lora_weights")).lower()
    if method.startswith(CHANGE_THE_BASE):
        raise WorkhorseError(
            f"{path}: init_lora_weights={shown(method)} changes the weights of the base; "
            f"{MERGE if method.startswith('loftq') else CONVERT}"
        )
    for key in given.keys() - fields.keys() - NO_EFFECT.keys():
        if given[key]:
            remedy = "train the adapter without it" if key in NOT_MERGED else MERGE
            raise WorkhorseError(
                f"{path}: {key}={as_written(given[key])} is not supported; {remedy}"
            )
    try:
        config = PeftConfig(**fields)
    except ConfigError as error:
        raise WorkhorseError(f"{path}: {error}") from None
    slow = sum(_choices(one) > 0 for one in (*config.rank_pattern, *config.alpha_pattern))
    if slow > MAX_PATTERNS:
        raise WorkhorseError(f"{path}: matching {slow} patterns would take long; {GIVE_NAMES}")
    return config


def written_config(
    config: LoraConfig, updates: Mapping[str, Update], saved: Iterable[str], weights: list[str]
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Args:
        config: the options of the adapter.
        updates: the updates, by the names of their targets, which are modules or parameters.
        saved: the names of the weights that are saved in full.
        weights: the names of all weights.
    """
    names, known = [*modules_of(weights), *weights], set(weights)
    ranks = {target: update.rank for target, update in updates.items()}
    alphas = {target: _plain(update.alpha) for target, update in updates.items()}
    target_parameters = [target for target in updates if target in known]
    target_modules = [target for target in updates if target not in known]
    saved_modules = [weight.rpartition(".")[0] for weight in saved]
    written = PeftConfig(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=_plain(config.alpha),
        rank_pattern=pattern(ranks, config.rank, names),
        alpha_pattern=pattern(alphas, _plain(config.alpha), names),
        lora_dropout=0 if target_parameters else config.dropout,  # PEFT has none for parameters
        use_rslora=config.scaling == "sqrt_rank",
        use_dora=config.dora,
        modules_to_save=shortest(saved_modules, names, str.endswith) or None,
        target_parameters=sorted(shortest(target_parameters, names)) or None,
    )
    targets = sorted(shortest(target_modules, names))
    return {**NO_EFFECT, **UNSUPPORTED, **written.to_dict(), "target_modules": targets}


def modules_of(weights: Iterable[str]) -> list[str]:
    """The names of the modules that contain weights, directly or in a child module."""
    paths = (name.split(".") for name in weights)
    return list(dict.fromkeys(".".join(path[:n]) for path in paths for n in range(1, len(path))))


def shortest(
    chosen: Iterable[str], names: Iterable[str], fits: Callable[[str, str], bool] = ends_with
) -> list[str]:
    """The shortest suffixes that fit the chosen names, and no others of `names`."""
    chosen = dict.fromkeys(chosen)
    others = [name for name in names if name not in chosen]
    suffixes: list[str] = []
    for name in chosen:
        if not any(fits(name, suffix) for suffix in suffixes):
            parts = name.split(".")
            candidates = (".".join(parts[n:]) for n in reversed(range(len(parts))))
            suffixes.append(next(c for c in candidates if not any(fits(o, c) for o in others)))
    return suffixes


def pattern(values: Mapping[str, Value], default: Value, names: Iterable[str]) -> dict[str, Value]:
    """The values that differ from the default, by the shortest suffixes of their names.

    Args:
        values: the values by name.
        default: the value of a name that no suffix fits.
        names: all names, including those of `values`.
    """
    others = dict.fromkeys(value for value in values.values() if value != default)
    return {
        suffix: other
        for other in others
        for suffix in shortest([name for name, value in values.items() if value == other], names)
    }


def matching(patterns: Mapping[str, Value], name: str, default: Value) -> Value:
    """The value of the first pattern, a regular expression, that fits the end of a name.

    Raises:
        WorkhorseError: a pattern is not valid, or it may take long.
    """
    fits = (value for pattern, value in patterns.items() if _compiled(pattern).match(name))
    return next(fits, default)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    simple = len(pattern) <= MAX_LENGTH and _choices(pattern) <= MAX_CHOICES
    with suppress(re.error):
        if simple and SIMPLE.fullmatch(pattern):
            return re.compile(rf"(.*\.)?({pattern})$")
    raise WorkhorseError(
        f"the pattern {shown(pattern)} is invalid, or may take too long to match; {GIVE_NAMES}"
    )


def _choices(pattern: str) -> int:
    """The number of repetitions and groups of a pattern."""
    return len(re.findall(r"[*+?(]", pattern.replace("(?:", "(")))


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
