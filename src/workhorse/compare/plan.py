"""The plan of a study: the recipe of every variant at the study's budget, and the list of trials.

A study compares variants of a recipe. A trial is one training run of a variant. Checks make sure
that the variants are comparable.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workhorse.compare.study import BudgetConfig, Settings, Study
from workhorse.config.base import ConfigError
from workhorse.config.errors import LARGEST
from workhorse.config.overrides import differences, written
from workhorse.data.sources import check_outside
from workhorse.devices.names import resolve_device
from workhorse.errors import WorkhorseError
from workhorse.memory.capacity import check_held, check_training
from workhorse.memory.step_memory import PlannedStep
from workhorse.models.describe import flops_per_token
from workhorse.run.check import check_length, check_recipe
from workhorse.train import Recipe, override_recipe, with_init

Measure = Literal["loss", "bits_per_byte"]
"""Name of the loss that a study compares, as in a run's metrics."""


def measure_of(recipes: Mapping[str, Recipe], baseline: str) -> Measure:
    """Return the loss to compare variants by: `loss` (per token) if all train on the same tokens.

    If tokenizers or packing differ, losses per token are not comparable, and the result is
    `bits_per_byte`.

    Args:
        recipes: each variant's recipe, by the variant's name.
        baseline: the name of the variant that the others are compared with.

    Raises:
        WorkhorseError: a variant's data differ from the baseline's in more than packing.
    """
    measure: Measure = "loss"
    for name, recipe in recipes.items():
        before, now = (
            {"data": one.data.to_dict(), "tokenizer": one.tokenizer.to_dict()}
            for one in (recipes[baseline], recipe)
        )
        for path, _, _ in differences(before, now):
            if path[:2] == ("data", "cache_dir"):  # it does not affect the data
                continue
            if path[0] == "data" and path != ("data", "packing"):
                raise WorkhorseError(
                    f"{name!r} has a different {'.'.join(path)} than {baseline!r}: losses on "
                    "different text are not comparable; set it in the base, for all variants"
                )
            measure = "bits_per_byte"
    return measure


def check_different(recipes: Mapping[str, Recipe]) -> None:
    """Check that no two variants have the same recipe after all defaults are filled in.

    Raises:
        ConfigError: two variants are equal.
    """
    seen: dict[str, str] = {}
    for name, recipe in recipes.items():
        same = recipe.expanded().replace(description="")
        fields = repr(same.replace(data=same.data.replace(cache_dir=None)).to_dict())
        if (other := seen.setdefault(fields, name)) != name:
            raise ConfigError(
                f"{other!r} and {name!r} are the same after defaults are filled in; change or "
                "remove one",
                "variants",
            )


def check_parameters(counts: Mapping[str, int], baseline: str, allowed: bool | float) -> None:
    """Check that the variants' parameter counts are close enough to the baseline's.

    Args:
        counts: each variant's parameter count, by the variant's name.
        baseline: the name of the variant that the others are compared with.
        allowed: the allowed relative difference; True: 0; False: no limit.

    Raises:
        WorkhorseError: a variant's count differs by more than `allowed`.
    """
    if allowed is False:
        return
    share = 0.0 if allowed is True else allowed
    wanted = counts[baseline]
    for name, count in counts.items():
        if abs(count - wanted) > share * wanted:
            raise WorkhorseError(
                f"{name!r} has {count:,} parameters, {count / wanted - 1:+.2%} relative to the "
                f"{wanted:,} of {baseline!r}, and budget.parameters allows {share:.2%}; "
                "change the sizes of its model, or budget.parameters"
            )


Vocabulary = Callable[[Recipe], int]
StepSeconds = Callable[[str, Recipe], float]

SAVES = 5
"""Minimum number of checkpoints per trial, so that a killed trial loses at most a fifth of
its steps."""


@dataclass(frozen=True)
class Variant:
    """One variant of a study: its recipe and its size."""

    name: str
    settings: Settings
    """Settings that differ from the study's base recipe."""
    recipe: Recipe
    """The variant's recipe, with the number of steps that fits the budget."""
    parameters: int
    flops_per_token: int
    """Floating-point operations to train on one token, forward and backward."""
    vocab_size: int

    @property
    def tokens(self) -> int:
        """Number of training tokens of one run of the variant."""
        return self.recipe.train.length * self.recipe.train.tokens_per_step

    @property
    def flops(self) -> int:
        """Training FLOPs of one run of the variant."""
        return self.flops_per_token * self.tokens


@dataclass(frozen=True)
class Trial:
    """One training run of a study: a variant with a seed and a learning rate factor."""

    variant: str
    seed: int
    factor: float = 1.0
    searches: bool = False
    """True if the trial belongs to the learning rate search; its loss is not compared."""

    @property
    def folder(self) -> str:
        """The run directory of the trial, relative to the study's folder."""
        own = f"rate-{self.factor!r}" if self.searches else f"seed-{self.seed}"
        return f"trials/{self.variant}/{own}"

    def __str__(self) -> str:
        if self.searches:
            return f"{self.variant}, learning rate × {self.factor:g}"
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """The variants of a study and all of its trials (runs)."""

    study: Study
    variants: dict[str, Variant]
    measure: Measure
    notices: list[str] = field(default_factory=list)
    """One-line messages about settings of the base recipe that do not apply to a variant and were
    dropped or adapted."""

    @property
    def searching(self) -> list[Trial]:
        """The trials of the learning rate search; empty if the study has only one factor."""
        study = self.study
        if not study.searches:
            return []
        return [
            Trial(name, study.search_seed, factor, searches=True)
            for factor in study.learning_rates
            for name in self.variants
        ]

    def trials(self, factors: dict[str, float]) -> list[Trial]:
        """The trials whose losses are compared, ordered by seed.

        Args:
            factors: each variant's learning rate factor, by the variant's name.
        """
        return [
            Trial(name, seed, factors[name]) for seed in self.study.seeds for name in self.variants
        ]

    @property
    def all_trials(self) -> list[Trial]:
        """All trials: those of the learning rate search, and the compared ones.

        The compared ones have factor 1 instead of the factor that the search will choose.
        """
        return [*self.searching, *self.trials(dict.fromkeys(self.variants, 1.0))]

    def recipe(self, trial: Trial, cache: str, threads: int) -> Recipe:
        """The recipe that a trial is trained with.

        It is the variant's recipe without generated samples and with more checkpoints.

        Args:
            trial: a trial of this plan.
            cache: the folder of the token shards, unless the recipe sets `data.cache_dir`.
            threads: the number of CPU threads, unless the recipe sets `train.threads`; 0 lets
                PyTorch decide.
        """
        recipe = self.variants[trial.variant].recipe
        train = recipe.train
        return recipe.replace(
            name=f"{self.study.name}-{trial.folder.removeprefix('trials/').replace('/', '-')}",
            data=recipe.data.replace(cache_dir=recipe.data.cache_dir or cache),
            train=train.replace(
                seed=trial.seed,
                optimizer=train.optimizer.scaled(trial.factor),
                threads=train.threads or threads,
                samples=None,
                # Ceiling division: at least `SAVES` checkpoints, at most one per step.
                checkpoint_every=min(train.checkpoint_every, -(-train.length // SAVES)),
            ),
        )


def with_settings(study: Study, settings: Iterable[str]) -> Study:
    """Return a copy of a study with `section.key=value` settings applied to its base recipe.

    Raises:
        ConfigError: a setting cannot be applied.
    """
    assert isinstance(study.base, dict), "read_study reads the base"
    try:
        return study.replace(base=override_recipe(study.base, settings, lambda line: None))
    except ConfigError as error:
        raise error.below("base") from None


QUICK = (
    "This is a quick run with less training than the study specifies: it only checks that the "
    "study works, not which variant is better."
)


def quick(study: Study) -> Study:
    """The shortened study that `--quick` runs: the study with the changes of its `quick` section.

    Its question begins with a note that the run is quick.

    Raises:
        ConfigError: the study has no `quick` section, or its settings cannot be applied.
    """
    if study.quick is None:
        raise ConfigError(
            "the study has no quick section; add one, such as "
            "quick: {budget: {steps: 10}, seeds: [1, 2]}",
            "quick",
        )
    changes: dict[str, Any] = {
        name: value
        for name in ("budget", "seeds", "learning_rates")
        if (value := getattr(study.quick, name)) is not None
    }
    changes["question"] = f"{QUICK} {study.question}".strip()
    settings = [f"{key}={written(value)}" for key, value in study.quick.settings.items()]
    return with_settings(study.replace(**changes), settings)


def make_plan(
    study: Study, vocabulary: Vocabulary, step_seconds: StepSeconds | None = None
) -> Plan:
    """Make the plan of a study, and check that every trial can start.

    Args:
        study: the study; `base` must contain the fields of the recipe, not the name of a file.
        vocabulary: a function that returns a recipe's vocabulary size.
        step_seconds: a function that returns a variant's time per step from its name and recipe.
            If it is None and the budget is in seconds, the recipes keep their number of steps.

    Raises:
        ConfigError: a variant is not a valid recipe, or equals another variant.
        WorkhorseError: a variant cannot be trained on this machine, its data differ from the
            baseline's, its parameter count differs by more than allowed, or the budget is less
            than one step.
    """
    _check_base(study)
    told: dict[str, list[str]] = {}
    variants: dict[str, Variant] = {}
    sizes: dict[str, int] = {}
    for name, settings in study.all_variants().items():
        plain = _recipe(study, name, settings)
        tokenizer = plain.tokenizer.to_json()
        if tokenizer not in sizes:
            sizes[tokenizer] = vocabulary(plain)
        parameters, flops, vocab_size = _size(plain, sizes[tokenizer])
        _check_contexts(study, name, plain, sizes[tokenizer])
        steps = _steps(study.budget, name, plain, flops, step_seconds)

        def notify(line: str, name: str = name) -> None:
            told.setdefault(line, []).append(name)

        recipe = _recipe(study, name, {**settings, "train.steps": steps}, notify)
        _check_rates(study, name, recipe)
        _check_room(name, recipe, sizes[tokenizer])
        variants[name] = Variant(name, settings, recipe, parameters, flops, vocab_size)
    recipes = {name: variant.recipe for name, variant in variants.items()}
    check_different(recipes)
    measure = measure_of(recipes, study.compared_with)
    counts = {name: variant.parameters for name, variant in variants.items()}
    check_parameters(counts, study.compared_with, study.budget.parameters)
    notices = [
        line if len(names) == len(variants) else f"{', '.join(names)}: {line}"
        for line, names in told.items()
    ]
    return Plan(study, variants, measure, notices)


def check_variants(study: Study, out: Path) -> None:
    """Check that `train` would accept every variant. Only the beginning of the data is read.

    Args:
        study: the study; `base` must contain the fields of the recipe, not the name of a file.
        out: the study's folder. Its files must not be part of the training data.

    Raises:
        WorkhorseError: a variant cannot be trained, or its data has no validation split.
    """
    _check_base(study)
    recipes = {
        name: _recipe(study, name, settings) for name, settings in study.all_variants().items()
    }
    measure_of(recipes, study.compared_with)
    for name, recipe in recipes.items():
        try:
            check_recipe(recipe)
            check_length(recipe)
            for inside in (out, out / Trial(name, 0).folder):
                check_outside(recipe.data, inside)
        except WorkhorseError as error:
            raise WorkhorseError(f"variants.{name}: {error}") from None
        if not any(source.has_validation for source in recipe.data.sources.values()):
            raise WorkhorseError(
                "base.data.corpus has no validation split to compare losses on; set "
                "data.corpus.validation_fraction, or data.corpus.validation"
            )


def _check_base(study: Study) -> None:
    """Check a study's base recipe, so that its errors are not reported as errors of a variant."""
    try:
        base = with_init(study.base) if isinstance(study.base, dict) else study.base
        if (minutes := Recipe.from_dict(base).train.minutes) is not None:
            raise ConfigError(
                f"{minutes:g} conflicts with the study's budget; replace it by train.steps, which "
                "the budget overrides",
                "train.minutes",
            )
    except ConfigError as error:
        raise error.below("base") from None


def _recipe(
    study: Study,
    name: str,
    settings: Settings,
    notify: Callable[[str], object] = lambda line: None,
) -> Recipe:
    """A variant's recipe: the study's base recipe with the variant's settings applied."""
    assert isinstance(study.base, dict), "read_study reads the base"
    changes = [f"{key}={written(value)}" for key, value in settings.items()]
    try:
        return Recipe.from_dict(with_init(override_recipe(study.base, changes, notify)))
    except ConfigError as error:
        raise error.below(f"variants.{name}") from None


def _size(recipe: Recipe, vocabulary: int) -> tuple[int, int, int]:
    """A model's parameter count, the FLOPs to train it on one token, and its vocabulary size."""
    config = recipe.decoder_config(vocabulary)
    decoder = config.build(recipe.train.kernel, device="meta")
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    frozen = recipe.adapter is not None
    flops = flops_per_token(decoder, recipe.train.seq_len, frozen=frozen)
    return parameters, flops, config.vocab_size


def _check_room(name: str, recipe: Recipe, vocabulary: int) -> None:
    device, config = resolve_device(recipe.train.device), recipe.decoder_config(vocabulary)
    step = PlannedStep.of_recipe(recipe, config, device)
    try:
        if recipe.train.micro_batch_size == "auto":
            check_held(step)
        else:
            check_training(step)
    except WorkhorseError as error:
        raise WorkhorseError(f"variants.{name}: {error}") from None


def _check_contexts(study: Study, name: str, recipe: Recipe, vocabulary: int) -> None:
    longest = recipe.decoder_config(vocabulary).max_seq_len
    if study.contexts and study.contexts[-1] > longest:
        raise ConfigError(
            f"{study.contexts[-1]} is larger than max_seq_len={longest} of {name!r}; raise "
            "model.max_seq_len in the base",
            "contexts",
        )


def _check_rates(study: Study, name: str, recipe: Recipe) -> None:
    for factor in study.learning_rates:
        try:
            recipe.train.optimizer.scaled(factor)
        except ConfigError as error:
            raise ConfigError(
                f"{factor:g} times the learning rate of {name!r} is not valid ({error.reason}); "
                "choose another factor",
                "learning_rates",
            ) from None


def _steps(
    budget: BudgetConfig,
    name: str,
    recipe: Recipe,
    flops: int,
    step_seconds: StepSeconds | None,
) -> int:
    """The number of training steps of a variant that fits the budget of a study.

    `flops` are the FLOPs to train on one token. For `step_seconds`, see `make_plan`.
    """
    tokens = recipe.train.tokens_per_step
    match budget.kind:
        case "steps":
            cost = 1.0
        case "tokens":
            cost = tokens
        case "flops":
            cost = flops * tokens
        case "seconds":
            if step_seconds is None:
                return recipe.train.length
            cost = step_seconds(name, recipe)
    steps = int(min(budget.amount // cost, LARGEST + 1.0))
    if steps > LARGEST:
        raise ConfigError(
            f"{budget.amount:g} is enough for 2^63 steps of {name!r} or more, which is too many; "
            "lower it",
            f"budget.{budget.kind}",
        )
    if steps < 1:
        raise WorkhorseError(
            f"budget.{budget.kind}={budget.amount:g} is less than one step of {name!r}, which "
            f"takes {cost:.4g}; raise it, or lower train.batch_size or train.seq_len"
        )
    return steps
