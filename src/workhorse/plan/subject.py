"""Find the model and training settings to plan, and compute-optimal sizes by published laws.

Each scaling law was fitted by its authors to their own models and data, so the laws' results differ
widely. A budget is the number of floating-point operations of a training: 6 · N · D, for N
parameters and D tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.checkpoints.stored import is_stored, no_such_model, open_stored
from workhorse.config.base import ConfigError
from workhorse.config.overrides import apply_overrides
from workhorse.memory.step_memory import PlannedStep
from workhorse.models import find_preset, preset_names
from workhorse.models.describe import FLOPS_PER_PARAMETER, count_parameters
from workhorse.nn import DecoderConfig
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.run.dry_run import vocab_size_of
from workhorse.train import Recipe, override_recipe, with_init
from workhorse.train.recipe.depth import is_on_dial, read_recipe
from workhorse.train.recipe.training import TrainConfig

PF_DAY = 1e15 * 24 * 3600
"""Floating-point operations of a petaflop/s-day."""


class Optimum(NamedTuple):
    """The compute-optimal model size and number of tokens for a budget, by one scaling law."""

    law: str
    """Name of the law."""
    parameters: float
    tokens: float
    loss: float | None
    """Predicted loss in nats per token; None if the law does not predict one."""


class Parametric(NamedTuple):
    """A scaling law of the form `L(N, D) = E + A / N^alpha + B / D^beta` (2203.15556 eq. 2).

    L is the loss, N the number of parameters and D the number of tokens.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """The N and D with the lowest loss for which `6 · N · D = flops` (2203.15556 eq. 4)."""
        product, total = flops / FLOPS_PER_PARAMETER, self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / total)
        return g * product ** (self.beta / total), product ** (self.alpha / total) / g


HOFFMANN = Parametric(1.69, 406.4, 410.7, 0.34, 0.28)
"""The coefficients that Hoffmann et al. fitted: 2203.15556 §3.3, eq. 10."""
BESIROGLU = Parametric(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The coefficients that Besiroglu et al. fitted to the runs of Hoffmann et al.: 2404.10102
table 1."""
LEAST_FITTED = 6e18
"""The smallest budget of the isoFLOP curves of 2203.15556 (§3.2)."""
CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Compute-optimal number of tokens per parameter: the approximate result of the first two methods
of 2203.15556 at every budget (table 3)."""


def optima(flops: float) -> list[Optimum]:
    """The compute-optimal sizes by each law in `LAWS`, for a budget of `flops` operations."""
    found: list[Optimum] = []
    for name, law in LAWS.items():
        fitted = isinstance(law, Parametric)
        sizes = law.optimum(flops) if fitted else law(flops)
        found.append(Optimum(name, *sizes, law.loss(*sizes) if fitted else None))
    return found


def _kaplan(flops: float) -> tuple[float, float]:
    """The compute-optimal sizes by Kaplan et al. (2001.08361 table 6), without a predicted loss.

    Their parameters do not include embeddings.
    """
    days = flops / PF_DAY
    return 1.3e9 * days**0.73, 2e10 * days**0.27


def _twenty(flops: float) -> tuple[float, float]:
    parameters = (flops / (FLOPS_PER_PARAMETER * CHINCHILLA_TOKENS_PER_PARAMETER)) ** 0.5
    return parameters, CHINCHILLA_TOKENS_PER_PARAMETER * parameters


LAWS: dict[str, Parametric | Callable[[float], tuple[float, float]]] = {
    "Kaplan et al., 2001.08361": _kaplan,
    "Hoffmann et al., 2203.15556, 20 tokens a parameter": _twenty,
    "Hoffmann et al., 2203.15556, parametric fit": HOFFMANN,
    "Besiroglu et al., 2404.10102, fitted again": BESIROGLU,
}


LONGEST_ASSUMED = 4096
"""Maximum sequence length assumed for a model without a recipe."""
MOST_STEPS = 10**12
"""Temporary number of steps, until the sizes of the model and of a step are known."""
PARALLEL = "parallel."
"""Prefix of the settings that divide the work among devices."""


@dataclass(frozen=True)
class Subject:
    """A model and its training settings, which `plan` estimates.

    Attributes:
        name: name to show to the user.
        kind: `recipe`, `run`, `preset`, or the kind of a stored model.
        config: the decoder's config.
        train: the training settings.
        mesh: the parallelism settings.
        packed: True if rows hold several documents, separated by a mask.
        adapter: the adapter to train; None to train all weights.
        assumed: settings that the user did not give and that got a default, as `section.key=value`.
    """

    name: str
    kind: str
    config: DecoderConfig
    train: TrainConfig
    mesh: ParallelismConfig
    packed: bool
    adapter: AdapterConfig | None
    assumed: tuple[str, ...] = ()

    def step(self, train: TrainConfig, device: torch.device) -> PlannedStep:
        """The step with the given training settings on a device."""
        return PlannedStep(self.config, train, device, self.mesh, self.packed, self.adapter)


def has_end(train: TrainConfig) -> bool:
    """False if nothing determines the number of steps; `train.steps` then has no meaning."""
    return train.steps != MOST_STEPS


def find_subject(
    source: str | Path,
    settings: Iterable[str] = (),
    notify: Callable[[str], object] = lambda line: None,
    *,
    devices: int | None = None,
) -> Subject:
    """Find the model and the training settings of a source, and apply overrides to them.

    Args:
        source: a recipe's file, `depth-N` for a built-in recipe, a run directory, a preset's name,
            or a stored model.
        settings: overrides as `section.key=value`, including `parallel.key=value`.
        notify: callback for warnings about settings that are dropped or adapted.
        devices: number of devices; None: the product of the `parallel` settings.

    Raises:
        WorkhorseError: the source does not exist, the number of devices is not divisible by the
            `parallel` settings, or a setting cannot be applied.
    """
    of_mesh = [one for one in settings if one.startswith(PARALLEL)]
    others = [one for one in settings if not one.startswith(PARALLEL)]
    path = Path(source)
    in_file = path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf")
    vocab_size = 1  # a complete model's own vocab_size takes precedence
    assumed: list[str] = []
    if in_file or is_on_dial(source):
        kind = "recipe"
        recipe = Recipe.from_dict(with_init(override_recipe(read_recipe(source), others, notify)))
        vocab_size = vocab_size_of(recipe)
    elif (run := RunDirectory.at(path)).exists:
        kind, fields = "run", run.recipe()
        fields["model"] = DecoderConfig.from_dict(run.config.to_dict()).to_dict()
        recipe = Recipe.from_dict(override_recipe(fields, others, notify))
    else:
        kind, config = _model(source, notify)
        rows = _mesh(of_mesh, UNDIVIDED, devices).parts
        recipe, assumed = _assumed(config, others, notify, rows=rows)
    return Subject(
        str(source),
        kind,
        recipe.decoder_config(vocab_size),
        recipe.train,
        _mesh(of_mesh, recipe.parallel, devices, whole=recipe.adapter is not None),
        recipe.data.packed,
        recipe.adapter,
        tuple(assumed),
    )


def _mesh(
    settings: list[str], parallel: ParallelismConfig, devices: int | None, *, whole: bool = False
) -> ParallelismConfig:
    """A recipe's parallelism settings, with overrides and a number of devices applied.

    If `devices` is None, the number of devices is the product of the settings. `whole` is True if
    the weights cannot be sharded.
    """
    fields = apply_overrides({"parallel": parallel.to_dict()}, settings)["parallel"]
    try:
        mesh = ParallelismConfig.from_dict(fields)
        if devices is None or devices == mesh.processes:
            return mesh
        if mesh.processes > 1:
            return mesh.on(devices)
        return mesh.replace(data=devices) if whole else mesh.replace(shard=devices)
    except ConfigError as error:
        raise error.below("parallel") from None


def _model(source: str | Path, notify: Callable[[str], object]) -> tuple[str, DecoderConfig]:
    name = str(source)
    if is_stored(name):
        stored = open_stored(source, notify, weights=False)
        return stored.kind, stored.config
    if name in preset_names():
        return "preset", find_preset(name).config
    raise no_such_model(name)


def _assumed(
    config: DecoderConfig, settings: list[str], notify: Callable[[str], object], *, rows: int
) -> tuple[Recipe, list[str]]:
    """A recipe with default settings for a model without a recipe, and the assumed defaults.

    A batch has `rows` rows. Defaults that `settings` override are not among the assumed ones, which
    are returned as `section.key=value`. No number of steps is assumed for fine-tuning.
    """
    train: dict[str, Any] = {
        "batch_size": rows,  # one row per data-parallel part of the mesh
        "seq_len": min(config.max_seq_len, LONGEST_ASSUMED),
        "dtype": "bfloat16",
        "optimizer": {"kind": "adamw", "learning_rate": 3e-4},
        "steps": MOST_STEPS,
    }
    fields = {
        "name": "plan",
        "model": config.to_dict(),
        "tokenizer": {"kind": "bytes"},
        "data": {"corpus": {"kind": "text", "path": "none"}},
        "train": train,
    }
    said = {setting.partition("=")[0] for setting in settings}
    if any(f"{name}.".startswith("adapter.") for name in said):
        fields["init"] = "the model itself"  # an adapter needs one
    if "train.minutes" in said:
        del train["steps"]
    endless = Recipe.from_dict(override_recipe(fields, settings, lambda line: None))
    if "steps" in train and endless.init is None:
        parameters = count_parameters(endless.decoder_config(1))["total"]
        tokens = CHINCHILLA_TOKENS_PER_PARAMETER * parameters
        train["steps"] = max(1, round(tokens / endless.train.tokens_per_step))
    recipe = Recipe.from_dict(override_recipe(fields, settings, notify))
    shown = {**train, "optimizer.kind": "adamw"}
    del shown["optimizer"]
    if train.get("steps") == MOST_STEPS:
        del shown["steps"]
    assumed = [
        f"train.{key}={value}"
        for key, value in shown.items()
        if not any(f"train.{key}.".startswith(f"{name}.") for name in said)
    ]
    return recipe, assumed
