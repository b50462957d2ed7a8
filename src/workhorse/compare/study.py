"""A study: one question about a design, the variants that answer it, and what each may spend."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from workhorse.config.base import Config, ConfigError, read_yaml
from workhorse.config.dial import is_on_dial, read_recipe
from workhorse.errors import WorkhorseError, nearest, shown

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Factor = Annotated[float, Field(gt=0)]
BudgetKind = Literal["steps", "tokens", "flops", "seconds"]
BUDGETS: tuple[BudgetKind, ...] = get_args(BudgetKind)
Settings = dict[str, Any]
"""Dotted keys of a recipe, `model.n_layers`, with their values."""

SEARCH_SEED = 1_000_000
"""Of the search for a learning rate, unless the study names one."""
LONGEST_NAME = 100
MOST_VARIANTS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*")
_SET_BY_STUDY = {
    "name": "a trial is named after its variant",
    "train": "write its settings one by one, as train.batch_size",
    "train.steps": "the study's budget gives the steps",
    "train.minutes": "the study's budget gives the steps",
    "train.seed": "the study's seeds give it",
}


class BudgetConfig(Config):
    """What every run of the study may spend: exactly one of steps, tokens, flops and seconds."""

    steps: Count | None = None
    """Updates of the weights."""
    tokens: Count | None = None
    """Tokens trained on; the last step that would exceed them is left out."""
    flops: float | None = Field(default=None, gt=0)
    """Floating-point operations of training, forward and backward."""
    seconds: float | None = Field(default=None, gt=0)
    """Time of the training steps. A variant's time per step is measured once and then kept."""
    parameters: bool | Annotated[float, Field(ge=0, lt=1)] = False
    """Whether variants must have as many parameters as the baseline. True: exactly as many; a
    number: up to this share more or fewer (0.01: one per cent)."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in BUDGETS if getattr(self, name)]
        if len(given) != 1:
            said = f"{' and '.join(given)} are set" if given else "none is set"
            raise ConfigError(f"a budget is one of steps, tokens, flops or seconds; {said}")
        return self

    @property
    def kind(self) -> BudgetKind:
        """Which of them is given."""
        return next(name for name in BUDGETS if getattr(self, name) is not None)

    @property
    def amount(self) -> float:
        """How much of it, in its own unit."""
        return getattr(self, self.kind)


class QuickConfig(Config):
    """What `--quick` changes, to see in little time that a study works."""

    settings: Settings = Field(default={})
    """Dotted keys of the recipe, written over the base of all variants."""
    budget: BudgetConfig | None = None
    """None: the study's."""
    seeds: tuple[Seed, ...] | None = None
    """None: the study's."""
    learning_rates: tuple[Factor, ...] | None = None
    """None: the study's."""

    @model_validator(mode="after")
    def _leaves_the_rest(self) -> Self:
        check_settings(self.settings, "settings")
        return self


class Study(Config):
    """A comparison of design choices at an equal budget."""

    name: str
    """Name of the study. Its folder is `runs/NAME` unless another is given."""
    question: str = ""
    """What it is to answer, for people."""
    base: str | dict[str, Any]
    """The recipe that all variants begin from: its file, relative to the study's, `depth-N` of the
    dial, or its fields."""
    variants: dict[str, Settings] = Field(default={})
    """By name, the dotted keys of the recipe in which a variant differs from the base. Values are
    written over the base as the command line's settings are: a mapping replaces a whole section."""
    grid: dict[str, list[Any]] = Field(default={})
    """Instead of `variants`: dotted keys with lists of values. Every combination is one."""
    baseline: str | None = None
    """The variant that the others are compared with; None: the first."""
    budget: BudgetConfig
    """What each run may spend."""
    seeds: tuple[Seed, ...]
    """Every variant is trained with each. Two are the fewest that give an interval."""
    learning_rates: tuple[Factor, ...] = (1.0,)
    """Factors on the recipe's learning rates. If there are several, each variant is trained with
    each on `search_seed`, and goes on with the best."""
    search_seed: Seed = SEARCH_SEED
    """Seed of that search; none of `seeds`, so that no figure was chosen for being good."""
    contexts: tuple[Count, ...] = ()
    """Tokens of context at which each final model is measured too, the shortest first: the loss of
    the held-out text, cut into windows of so many. Beyond `train.seq_len` it shows how positions
    extrapolate; `model.max_seq_len` must hold the longest."""
    smallest_effect: float | None = Field(default=None, gt=0)
    """The smallest difference of the loss that would matter, in the unit of the report."""
    quick: QuickConfig | None = None
    """What `--quick` changes."""

    @field_validator("variants", mode="before")
    @classmethod
    def _nothing_said(cls, variants: Any) -> Any:
        """A variant without settings, `base:` alone on its line, is the base as it is."""
        if not isinstance(variants, dict):
            return variants
        named = {str(name): {} if said is None else said for name, said in variants.items()}
        if len(named) < len(variants):
            raise ConfigError("two of them have the same name; rename one", "variants")
        return named

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        _check_name(self.name, "name")
        if bool(self.variants) == bool(self.grid):
            there = "both are given" if self.grid else "neither is given"
            raise ConfigError(f"a study has variants or a grid; {there}")
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
                f"{self.baseline!r} is no variant; {nearest(self.baseline, names)}", "baseline"
            )
        _check_different(self.seeds, "seeds")
        _check_different(self.learning_rates, "learning_rates")
        if self.contexts:
            _check_different(self.contexts, "contexts")
            if list(self.contexts) != sorted(self.contexts):
                raise ConfigError("they are not in order; begin with the shortest", "contexts")
        if self.search_seed in self.seeds:
            raise ConfigError(
                f"{self.search_seed} is one of the seeds too, whose figures would then be chosen "
                "for being good; take another",
                "search_seed",
            )
        return self

    @property
    def searches(self) -> bool:
        """Whether a learning rate is to be found for each variant."""
        return len(self.learning_rates) > 1

    @property
    def compared_with(self) -> str:
        """The name of the baseline."""
        return self.baseline or next(iter(self.all_variants()))

    def all_variants(self) -> dict[str, Settings]:
        """The settings of every variant, by name; those of a grid written out."""
        return dict(self.variants) if self.variants else dict(_combinations(self.grid))


def read_study(file: str | Path) -> Study:
    """The study in a file, with the fields of its base instead of its file.

    Raises:
        ConfigError: a file is missing, or no study or recipe.
    """
    file = Path(file)
    study = Study.from_dict(read_yaml(file))
    if isinstance(study.base, dict):
        return study
    if is_on_dial(study.base):
        return study.replace(base=read_recipe(study.base))
    try:
        path = (file.parent / Path(study.base).expanduser()).resolve()
        there = path.is_file()
    except (OSError, RuntimeError, ValueError):  # what cannot name a file
        there = False
    if not there:
        raise ConfigError(
            f"{shown(study.base)} is no file beside {file}; give the path of a recipe from there",
            "base",
        )
    return study.replace(base=read_yaml(path))


def check_settings(settings: Settings, place: str) -> None:
    """Refuse keys that the study itself decides.

    Raises:
        ConfigError: there is one.
    """
    for key in settings:
        if reason := _SET_BY_STUDY.get(key):
            raise ConfigError(f"{key} cannot be set here: {reason}", place)


def _check_name(name: str, place: str) -> None:
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name[:LONGEST_NAME]!r}… has {len(name)} characters and cannot name a folder; "
            f"{LONGEST_NAME} are the most",
            place,
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a folder; use letters, digits and '_.=,+-' after the first",
            place,
        )


def _check_grid(grid: dict[str, list[Any]]) -> None:
    for key, values in grid.items():
        if not values:
            raise ConfigError("it has no values; list two or more", f"grid.{key}")
    if (count := math.prod(map(len, grid.values()))) > MOST_VARIANTS:
        raise ConfigError(
            f"it has {count:,} combinations, and {MOST_VARIANTS:,} are the most; list fewer values",
            "grid",
        )


def _check_different(values: Sequence[float], place: str) -> None:
    if not values:
        raise ConfigError("there is none; list one or more", place)
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{value:g} is listed {values.count(value)} times; keep one", place)


def _combinations(grid: dict[str, list[Any]]) -> Iterator[tuple[str, Settings]]:
    """The product of a grid's values, each combination named after its values."""
    words = {key: _words(values) for key, values in grid.items()}
    short = _shortened(list(grid))
    for indices in itertools.product(*(range(len(values)) for values in grid.values())):
        chosen = dict(zip(grid, indices, strict=True))
        name = ",".join(f"{short[key]}={words[key][index]}" for key, index in chosen.items())
        yield name, {key: grid[key][index] for key, index in chosen.items()}


def _words(values: list[Any]) -> list[str]:
    """A word for each value, fit for the name of a folder; its number where words are equal."""
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
    """Each dotted key by as few of its last names as tell it from the others."""
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
    """The error for what is not a `Study`."""
    return WorkhorseError(
        f"a Study is needed, not {type(subject).__name__}; read_study(path) makes one of a file"
    )
