"""The runs of a study: the recipe of every variant at the budget, and checks that they compare.

Nothing is trained or written here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workhorse.compare.study import BudgetConfig, Settings, Study
from workhorse.config.base import ConfigError
from workhorse.config.errors import LARGEST
from workhorse.config.overrides import written
from workhorse.data.sources import check_outside
from workhorse.devices.names import resolve_device
from workhorse.errors import WorkhorseError
from workhorse.memory.capacity import check_held, check_training
from workhorse.models.describe import flops_per_token
from workhorse.optim.groups import OptimizerConfig
from workhorse.optim.muon import MuonConfig
from workhorse.train import Recipe, override_recipe, with_init
from workhorse.train.check import check_length, check_recipe
from workhorse.train.resume import differences

Measure = Literal["loss", "bits_per_byte"]
"""What is compared, as a run's metrics name it."""


def measure_of(recipes: Mapping[str, Recipe], baseline: str) -> Measure:
    """Nats per token where all have the same tokens, otherwise bits per byte of the same text.

    Args:
        recipes: of the variants, by name.
        baseline: the name of one of them.

    Raises:
        WorkhorseError: one has other text than the baseline.
    """
    measure: Measure = "loss"
    for name, recipe in recipes.items():
        for path in _text_differences(recipes[baseline], recipe):
            if path[0] == "data" and path != ("data", "packing"):
                raise WorkhorseError(
                    f"{name!r} has another {'.'.join(path)} than {baseline!r}: losses on "
                    "different text say nothing about the design; give all variants the same, "
                    "in the base"
                )
            measure = "bits_per_byte"
    return measure


def _text_differences(first: Recipe, second: Recipe) -> Iterator[tuple[str, ...]]:
    """The settings of text and tokens that differ, without the place of the token shards."""
    for section in ("data", "tokenizer"):
        before, now = (getattr(recipe, section).to_dict() for recipe in (first, second))
        for path, _, _ in differences(before, now, (section,)):
            if path[:2] != ("data", "cache_dir"):
                yield path


def check_different(recipes: Mapping[str, Recipe]) -> None:
    """Refuse variants that are the same once written out.

    Raises:
        ConfigError: with their names.
    """
    seen: dict[str, str] = {}
    for name, recipe in recipes.items():
        same = recipe.written_out().replace(description="")
        fields = repr(same.replace(data=same.data.replace(cache_dir=None)).to_dict())
        if (other := seen.setdefault(fields, name)) != name:
            raise ConfigError(
                f"{other!r} and {name!r} are the same once written out; change or remove one of "
                "them",
                "variants",
            )


def check_parameters(counts: Mapping[str, int], baseline: str, allowed: bool | float) -> None:
    """Refuse variants with too many or too few parameters.

    Args:
        counts: parameters of the variants, by name.
        baseline: the name of one of them.
        allowed: the share by which others may differ from it; True: none; False: any.

    Raises:
        WorkhorseError: with the first that differs more.
    """
    if allowed is False:
        return
    share = 0.0 if allowed is True else allowed
    wanted = counts[baseline]
    for name, count in counts.items():
        if abs(count - wanted) > share * wanted:
            raise WorkhorseError(
                f"{name!r} has {count:,} parameters, {count / wanted - 1:+.2%} beside the "
                f"{wanted:,} of {baseline!r}, and budget.parameters allows {share:.2%}; "
                "change its sizes, or budget.parameters"
            )


Vocabulary = Callable[[Recipe], int]
StepSeconds = Callable[[str, Recipe], float]

SAVES = 5
"""The fewest checkpoints of a trial: a kill then costs no more than a part of one trial."""


@dataclass(frozen=True)
class Variant:
    """One design, at the study's budget."""

    name: str
    settings: Settings
    """In which it differs from the base."""
    recipe: Recipe
    """With the steps that the budget pays for."""
    parameters: int
    flops_per_token: int
    """Floating-point operations to train on one token."""

    @property
    def tokens(self) -> int:
        """Trained on in one run."""
        return self.recipe.train.length * self.recipe.train.tokens_per_step

    @property
    def flops(self) -> int:
        """Of one run."""
        return self.flops_per_token * self.tokens


@dataclass(frozen=True)
class Trial:
    """One run: a variant with a seed, at a factor on its learning rate."""

    variant: str
    seed: int
    factor: float = 1.0
    searches: bool = False
    """Whether it only helps to choose the factor."""

    @property
    def folder(self) -> str:
        """Its run directory, relative to the study's folder."""
        own = f"rate-{self.factor!r}" if self.searches else f"seed-{self.seed}"
        return f"trials/{self.variant}/{own}"

    def __str__(self) -> str:
        if self.searches:
            return f"{self.variant}, learning rate × {self.factor:g}"
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All that a study will train."""

    study: Study
    variants: dict[str, Variant]
    measure: Measure
    notices: list[str] = field(default_factory=list)
    """Settings that variants leave out or shorten, a line each."""

    @property
    def searching(self) -> list[Trial]:
        """The trials that find each variant's learning rate; none if there is nothing to find."""
        study = self.study
        if not study.searches:
            return []
        return [
            Trial(name, study.search_seed, factor, searches=True)
            for factor in study.learning_rates
            for name in self.variants
        ]

    def trials(self, factors: dict[str, float]) -> list[Trial]:
        """The trials that are compared, seed after seed, at each variant's factor."""
        return [
            Trial(name, seed, factors[name]) for seed in self.study.seeds for name in self.variants
        ]

    @property
    def all_trials(self) -> list[Trial]:
        """The search and the trials that are compared, with 1 for factors still to be found."""
        return [*self.searching, *self.trials(dict.fromkeys(self.variants, 1.0))]

    def recipe(self, trial: Trial, cache: str, threads: int) -> Recipe:
        """The recipe of one trial.

        It generates no samples and is saved often. Trials share token shards and threads, unless
        the recipe sets its own.

        Args:
            trial: of this plan.
            cache: the folder of the shards.
            threads: of the CPU; 0 lets PyTorch decide.
        """
        recipe = self.variants[trial.variant].recipe
        train = recipe.train
        return recipe.replace(
            name=f"{self.study.name}-{trial.folder.removeprefix('trials/').replace('/', '-')}",
            data=recipe.data.replace(cache_dir=recipe.data.cache_dir or cache),
            train=train.replace(
                seed=trial.seed,
                optimizer=scaled(train.optimizer, trial.factor),
                threads=train.threads or threads,
                samples=None,
                checkpoint_every=min(train.checkpoint_every, -(-train.length // SAVES)),
            ),
        )


def scaled(optimizer: OptimizerConfig, factor: float) -> OptimizerConfig:
    """An optimizer with its learning rate times a factor: with Muon, both of its rates."""
    if factor == 1:
        return optimizer
    changes: dict[str, Any] = {"learning_rate": optimizer.learning_rate * factor}
    if isinstance(optimizer, MuonConfig):
        changes["adamw"] = scaled(optimizer.adamw, factor)
    return optimizer.replace(**changes)


def with_settings(study: Study, settings: Iterable[str]) -> Study:
    """A study whose base has `section.key=value` settings written over it.

    Raises:
        ConfigError: one of them cannot be applied.
    """
    assert isinstance(study.base, dict), "read_study reads the base"
    try:
        return study.replace(base=override_recipe(study.base, settings, lambda line: None))
    except ConfigError as error:
        raise error.below("base") from None


QUICK = (
    "This is a quick run, with less training than the study asks for: it shows that the study "
    "works, not which variant is better."
)


def quick(study: Study) -> Study:
    """The study that `--quick` runs, its base and its question changed too.

    Raises:
        ConfigError: the study does not say how, or its settings cannot be applied.
    """
    if study.quick is None:
        raise ConfigError(
            "the study does not say what --quick changes; add quick, as "
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
    """The plan of a study, checked: if it is returned, every trial can begin.

    Args:
        study: with the fields of its base.
        vocabulary: gives the size of a recipe's vocabulary.
        step_seconds: gives a variant's time per step, by its name and its recipe; None leaves the
            base's steps where the budget is in seconds.

    Raises:
        ConfigError: a variant is no recipe, or is equal to another.
        WorkhorseError: a variant cannot be trained here, has other text or too many parameters, or
            the budget does not pay for a step of it.
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
        parameters, flops = _size(plain, sizes[tokenizer])
        _check_contexts(study, name, plain, sizes[tokenizer])
        steps = _steps(study.budget, name, plain, flops, step_seconds)

        def tell(line: str, name: str = name) -> None:
            told.setdefault(line, []).append(name)

        recipe = _recipe(study, name, {**settings, "train.steps": steps}, tell)
        _check_rates(study, name, recipe)
        _check_room(name, recipe, sizes[tokenizer])
        variants[name] = Variant(name, settings, recipe, parameters, flops)
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
    """Refuse variants that `train` would refuse; of the text only the beginning is read.

    Args:
        study: with the fields of its base.
        out: its folder.

    Raises:
        WorkhorseError: there is one, or nothing is held out to measure it on.
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
                "nothing of base.data.corpus is held out, so there is no loss to compare; set "
                "data.corpus.validation_fraction, or data.corpus.validation"
            )


def _check_base(study: Study) -> None:
    """Report mistakes of the base as its own, not as those of a variant."""
    try:
        base = with_init(study.base) if isinstance(study.base, dict) else study.base
        if (minutes := Recipe.from_dict(base).train.minutes) is not None:
            raise ConfigError(
                f"{minutes:g} cannot be kept, since the study's budget gives the steps; set "
                "train.steps in its place",
                "train.minutes",
            )
    except ConfigError as error:
        raise error.below("base") from None


def _recipe(
    study: Study,
    name: str,
    settings: Settings,
    tell: Callable[[str], object] = lambda line: None,
) -> Recipe:
    """A variant's recipe: the base with settings written over it."""
    assert isinstance(study.base, dict), "read_study reads the base"
    changes = [f"{key}={written(value)}" for key, value in settings.items()]
    try:
        return Recipe.from_dict(with_init(override_recipe(study.base, changes, tell)))
    except ConfigError as error:
        raise error.below(f"variants.{name}") from None


def _size(recipe: Recipe, vocabulary: int) -> tuple[int, int]:
    """Parameters, and floating-point operations to train on a token."""
    config = recipe.decoder_config(vocabulary)
    decoder = config.build(recipe.train.kernel, device="meta")
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    return parameters, flops_per_token(decoder, recipe.train.seq_len)


def _check_room(name: str, recipe: Recipe, vocabulary: int) -> None:
    device, config = resolve_device(recipe.train.device), recipe.decoder_config(vocabulary)
    try:
        if recipe.train.micro_batch_size == "auto":
            check_held(config, recipe.train, device)
        else:
            check_training(
                config,
                recipe.train,
                device,
                packed=recipe.data.packed,
                parallel=recipe.parallel,
            )
    except WorkhorseError as error:
        raise WorkhorseError(f"variants.{name}: {error}") from None


def _check_contexts(study: Study, name: str, recipe: Recipe, vocabulary: int) -> None:
    longest = recipe.decoder_config(vocabulary).max_seq_len
    if study.contexts and study.contexts[-1] > longest:
        raise ConfigError(
            f"{study.contexts[-1]} is more than the max_seq_len={longest} of {name!r}; set "
            "model.max_seq_len in the base",
            "contexts",
        )


def _check_rates(study: Study, name: str, recipe: Recipe) -> None:
    for factor in study.learning_rates:
        try:
            scaled(recipe.train.optimizer, factor)
        except ConfigError as error:
            raise ConfigError(
                f"{factor:g} times the learning rate of {name!r} is none ({error.reason}); choose "
                "another factor",
                "learning_rates",
            ) from None


def _steps(
    budget: BudgetConfig,
    name: str,
    recipe: Recipe,
    flops: int,
    step_seconds: StepSeconds | None,
) -> int:
    """The steps that the budget pays for."""
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
            f"{budget.amount:g} pays for 2^63 steps of {name!r} or more; lower it",
            f"budget.{budget.kind}",
        )
    if steps < 1:
        raise WorkhorseError(
            f"budget.{budget.kind}={budget.amount:g} is less than one step of {name!r}, which "
            f"takes {cost:.4g}; raise it, or lower train.batch_size or train.seq_len"
        )
    return steps
