"""The config of a study: a question about a design, the variants to compare, and their budget."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from workhorse.config.base import Config, ConfigError, read_yaml
from workhorse.errors import WorkhorseError, nearest, shown
from workhorse.train.recipe.depth import is_on_dial, read_recipe

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Factor = Annotated[float, Field(gt=0)]
BudgetKind = Literal["steps", "tokens", "flops", "seconds"]
BUDGETS: tuple[BudgetKind, ...] = get_args(BudgetKind)
Settings = dict[str, Any]
"""Settings of a recipe: values by dotted key, such as `model.n_layers`."""

SEARCH_SEED = 1_000_000
"""Default seed of the learning rate search."""
LONGEST_NAME = 100
MOST_VARIANTS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*")
_SET_BY_STUDY = {
    "name": "a trial is named after its variant",
    "train": "set its keys one by one, such as train.batch_size",
    "train.steps": "the study's budget determines the steps",
    "train.minutes": "the study's budget determines the steps",
    "train.seed": "the study's seeds determine it",
}


class BudgetConfig(Config):
    """The budget of each run of the study: exactly one of steps, tokens, flops and seconds."""

    steps: Count | None = None
    """Number of weight updates."""
    tokens: Count | None = None
    """Number of training tokens; a step that would exceed this number is not run."""
    flops: float | None = Field(default=None, gt=0)
    """Floating-point operations of training, forward and backward."""
    seconds: float | None = Field(default=None, gt=0)
    """Time of all training steps. A variant's time per step is measured once and then reused."""
    parameters: bool | Annotated[float, Field(ge=0, lt=1)] = False
    """Whether variants must have the baseline's number of parameters. True: exactly; a number:
    the allowed relative difference (0.01: one per cent)."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name)]
        if len(given) != 1:
            said = f"{' and '.join(given)} are set" if given else "none is set"
            raise ConfigError(f"a budget needs one of steps, tokens, flops or seconds; {said}")
        return self

    @property
    def kind(self) -> BudgetKind:
        """The kind of budget that is set: the name of its field."""
        return next(name for name in BUDGETS if getattr(self, name) is not None)

    @property
    def amount(self) -> float:
        """The size of the budget, in the unit of its kind."""
        return getattr(self, self.kind)


class QuickConfig(Config):
    """The changes made by `--quick`, a short run that checks that a study works."""

    settings: Settings = Field(default={})
    """Settings that override the base recipe of all variants, as dotted keys and values."""
    budget: BudgetConfig | None = None
    """Budget of each quick run; None: the study's."""
    seeds: tuple[Seed, ...] | None = None
    """Seeds of the quick runs; None: the study's."""
    learning_rates: tuple[Factor, ...] | None = None
    """Factors on the learning rates in quick runs; None: the study's."""

    @model_validator(mode="after")
    def _leaves_the_rest(self) -> Self:
        check_settings(self.settings, "settings")
        return self


class Study(Config):
    """A comparison of design choices at an equal budget."""

    name: str
    """Name of the study. Its folder is `runs/NAME` unless another is given."""
    question: str = ""
    """The question that the study answers, printed in the reports."""
    base: str | dict[str, Any]
    """The base recipe of all variants: its file, relative to the study's file, `depth-N` for a
    built-in recipe, or its fields."""
    variants: dict[str, Settings] = Field(default={})
    """Variants by name, each with the settings that differ from the base, as dotted keys and
    values. They override the base like settings on the command line: a mapping replaces a whole
    section."""
    grid: dict[str, list[Any]] = Field(default={})
    """Instead of `variants`: dotted keys with lists of values. Every combination is a variant."""
    baseline: str | None = None
    """The variant that the others are compared with; None: the first."""
    budget: BudgetConfig
    """The budget of each run."""
    seeds: tuple[Seed, ...]
    """Random seeds. Every variant is trained with each seed. Confidence intervals need at least
    two."""
    learning_rates: tuple[Factor, ...] = (1.0,)
    """Factors on the recipe's learning rates. If there are several, each variant is first trained
    with each factor on `search_seed`, and then compared at its best factor."""
    search_seed: Seed = SEARCH_SEED
    """Seed of the learning rate search. It must not be in `seeds`: losses that the search selected
    would bias the comparison."""
    contexts: tuple[Count, ...] = ()
    """Context lengths in tokens, in ascending order, at which each final model is also evaluated:
    the held-out text is cut into windows of that length. Lengths beyond `train.seq_len` measure
    length extrapolation; `model.max_seq_len` must be at least the longest."""
    smallest_effect: float | None = Field(default=None, gt=0)
    """The smallest difference of the loss that matters, in nats per token or bits per byte, as in
    the report."""
    quick: QuickConfig | None = None
    """The changes made by `--quick`."""

    @field_validator("variants", mode="before")
    @classmethod
    def _nothing_said(cls, variants: Any) -> Any:
        """Convert a variant without settings (a YAML line such as `small:`) to an empty mapping.

        Such a variant is the unchanged base recipe.
        """
        if not isinstance(variants, dict):
            return variants
        named = {str(name): {} if said is None else said for name, said in variants.items()}
        if len(named) < len(variants):
            raise ConfigError("two variants have the same name; rename one", "variants")
        return named

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        _check_name(self.name, "name")
        if bool(self.variants) == bool(self.grid):
            there = "both are given" if self.grid else "neither is given"
            raise ConfigError(f"a study needs either variants or grid; {there}")
        _check_grid(self.grid)
        for name, settings in self.all_variants().items():
            _check_name(name, "grid" if self.grid else "variants")
            check_settings(settings, "grid" if self.grid else f"variants.{name}")
        names = list(self.all_variants())
        if len(names) == 1:
            raise ConfigError(
                f"{names[0]!r} is the only variant; a comparison needs two or more", "variants"
            )
        if self.baseline is not None and self.baseline not in names:
            raise ConfigError(
                f"{self.baseline!r} is not a variant; {nearest(self.baseline, names)}", "baseline"
            )
        _check_different(self.seeds, "seeds")
        _check_different(self.learning_rates, "learning_rates")
        if self.contexts:
            _check_different(self.contexts, "contexts")
            if list(self.contexts) != sorted(self.contexts):
                raise ConfigError("the lengths are not in ascending order; sort them", "contexts")
        if self.search_seed in self.seeds:
            raise ConfigError(
                f"{self.search_seed} is also in seeds, which would bias the comparison; "
                "choose another",
                "search_seed",
            )
        return self

    @property
    def searches(self) -> bool:
        """True if the study searches a learning rate for each variant."""
        return len(self.learning_rates) > 1

    @property
    def compared_with(self) -> str:
        """The name of the baseline: the variant that the others are compared with."""
        return self.baseline or next(iter(self.all_variants()))

    def all_variants(self) -> dict[str, Settings]:
        """The settings of every variant by name: `variants`, or all combinations of `grid`."""
        return dict(self.variants) if self.variants else dict(_combinations(self.grid))


def read_study(file: str | Path) -> Study:
    """Read a study from a YAML file. If `base` names a recipe, the recipe's fields replace it.

    Raises:
        ConfigError: the study's or the recipe's file is missing or invalid.
    """
    file = Path(file)
    study = Study.from_dict(read_yaml(file, "study"))
    if isinstance(study.base, dict):
        return study
    if is_on_dial(study.base):
        return study.replace(base=read_recipe(study.base))
    try:
        path = (file.parent / Path(study.base).expanduser()).resolve()
        there = path.is_file()
    except (OSError, RuntimeError, ValueError):  # the string is not a valid path
        there = False
    if not there:
        raise ConfigError(
            f"{shown(study.base)} is not a file; give a recipe's path relative to {file}",
            "base",
        )
    return study.replace(base=read_yaml(path, "recipe"))


def check_settings(settings: Settings, place: str) -> None:
    """Check that a variant's settings do not contain keys that the study determines.

    `place` is the path of the settings in the study, for the error message.

    Raises:
        ConfigError: a key, such as `train.seed`, is determined by the study.
    """
    for key in settings:
        if reason := _SET_BY_STUDY.get(key):
            raise ConfigError(f"{key} cannot be set here: {reason}", place)


def _check_name(name: str, place: str) -> None:
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name[:LONGEST_NAME]!r}… has {len(name)} characters, too many for a folder name; "
            f"use up to {LONGEST_NAME}",
            place,
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid folder name; use a letter or digit, then letters, digits and "
            "'_.=,+-'",
            place,
        )


def _check_grid(grid: dict[str, list[Any]]) -> None:
    for key, values in grid.items():
        if not values:
            raise ConfigError("the list is empty; give two or more values", f"grid.{key}")
    if (count := math.prod(map(len, grid.values()))) > MOST_VARIANTS:
        raise ConfigError(
            f"the grid has {count:,} combinations, more than {MOST_VARIANTS:,}; list fewer values",
            "grid",
        )


def _check_different(values: Sequence[float], place: str) -> None:
    if not values:
        raise ConfigError("the list is empty; give one or more", place)
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{value:g} is listed {values.count(value)} times; keep one", place)


def _combinations(grid: dict[str, list[Any]]) -> Iterator[tuple[str, Settings]]:
    """Yield a variant for every combination of a grid's values: its name and its settings."""
    words = {key: _words(values) for key, values in grid.items()}
    short = _shortened(list(grid))
    for indices in itertools.product(*(range(len(values)) for values in grid.values())):
        chosen = dict(zip(grid, indices, strict=True))
        name = ",".join(f"{short[key]}={words[key][index]}" for key, index in chosen.items())
        yield name, {key: grid[key][index] for key, index in chosen.items()}


def _words(values: list[Any]) -> list[str]:
    """A word for each value, to be part of a variant's name. All words are different.

    Characters that are not valid in a folder name become `-`. Equal words get a number.
    """
    found = []
    for value in values:
        word = value.get("kind") if isinstance(value, dict) else value
        text = word if isinstance(word, str) else json.dumps(word)
        found.append(re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-")[:30] or "value")
    numbered = [f"{word}-{number}" for number, word in enumerate(found, start=1)]
    mixed = [
        word if found.count(word) == 1 else other
        for word, other in zip(found, numbered, strict=True)
    ]
    return mixed if len(set(mixed)) == len(mixed) else numbered


def _shortened(keys: list[str]) -> dict[str, str]:
    """Map each dotted key to its shortest ending that no other key has (`model.d_ff`: `d_ff`)."""
    short = {}
    for key in keys:
        names = key.split(".")
        for count in range(1, len(names) + 1):
            last = ".".join(names[-count:])
            if sum(other == last or other.endswith(f".{last}") for other in keys) == 1:
                break
        short[key] = last
    return short


def no_study(subject: object) -> WorkhorseError:
    """The error for an argument that should be a `Study` but is not."""
    return WorkhorseError(
        f"expected a Study, not {type(subject).__name__}; read one with read_study(path)"
    )
