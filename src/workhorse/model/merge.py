"""`merge`: one model from the weights of several, tensor by tensor.

The weights of the models stay memory-mapped, and each merged tensor is written before the next one
is computed. All arithmetic is in float32.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workhorse.checkpoints.huggingface.export import find_family, write_huggingface
from workhorse.checkpoints.model_folder import check_new, write_model
from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.tensors import weights_of
from workhorse.config.base import Config, ConfigError
from workhorse.data.sampling import derive
from workhorse.devices.names import dtype_name
from workhorse.errors import WorkhorseError, warn_caller
from workhorse.model.convert import whole_tokenizer
from workhorse.model.load import load
from workhorse.model.model import Model
from workhorse.models.describe import count_parameters
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.tokenizers import Tokenizer
from workhorse.transforms.adapters import adapters_of

Density = Annotated[float, Field(gt=0, le=1)]
PARALLEL_COSINE = 0.9995
"""Cosine above which SLERP interpolates linearly, as in mergekit."""
NEAR_ZERO = 1e-8
"""Norms and sums of weights below this count as zero."""


class LinearConfig(Config):
    """The weighted mean of the models' weights (model soups, 2203.05482)."""

    kind: Literal["linear"] = "linear"
    normalize: bool = True
    """True to divide by the sum of the weights."""

    def merge(self, parts: "Parts") -> Tensor:
        total = torch.zeros_like(parts.tensors[0])
        for weight, tensor in zip(parts.weights, parts.tensors, strict=True):
            total += weight * tensor
        return total / sum(parts.weights) if self.normalize else total


class SlerpConfig(Config):
    """Spherical interpolation between two models, each tensor as one vector (Shoemake, 1985)."""

    kind: Literal["slerp"] = "slerp"
    t: float = Field(default=0.5, ge=0, le=1)
    """Position between the first model (0) and the second (1)."""

    def merge(self, parts: "Parts") -> Tensor:
        first, second = parts.tensors
        cosine = float((_direction(first) * _direction(second)).sum())
        if abs(cosine) > PARALLEL_COSINE:
            return first + self.t * (second - first)
        angle = math.acos(cosine)
        before, after = math.sin(angle * (1 - self.t)), math.sin(angle * self.t)
        return (before * first + after * second) / math.sin(angle)


class _FromBaseConfig(Config):
    """Options of methods that add changes from the base model to it."""

    scale: float = 1.0
    """Factor on the sum of all changes."""

    def trim(self, change: Tensor, seed: int) -> Tensor:
        """Set some elements of a model's change to zero. `seed` is one of `Parts.seeds`."""
        del seed
        return change

    def merge(self, parts: "Parts") -> Tensor:
        assert parts.base is not None
        base, weights = parts.base, parts.weights
        trimmed = [
            weight * self.trim(tensor - base, seed)
            for weight, tensor, seed in zip(weights, parts.tensors, parts.seeds, strict=True)
        ]
        return base + self.scale * self.add(torch.stack(trimmed), weights)

    def add(self, changes: Tensor, weights: Sequence[float]) -> Tensor:
        """Combine the weighted changes, (models, ...)."""
        del weights
        return changes.sum(dim=0)


class TaskArithmeticConfig(_FromBaseConfig):
    """The base plus the weighted sum of the models' changes (2212.04089)."""

    kind: Literal["task_arithmetic"] = "task_arithmetic"


class TiesConfig(_FromBaseConfig):
    """Task arithmetic with the largest changes, and for each element only changes of one sign.

    The sign is that of the weighted sum. The result is the weighted mean over the models whose
    change has this sign (2306.01708).
    """

    kind: Literal["ties"] = "ties"
    density: Density = 0.5
    """Fraction of a model's changes that are kept, the largest ones; at least one per tensor."""

    def trim(self, change: Tensor, seed: int) -> Tensor:
        del seed
        kept = max(1, int(self.density * change.numel()))
        if kept == change.numel():
            return change
        flat = change.flatten()
        mask = torch.zeros_like(flat)
        # Of equal magnitudes the first are kept.
        mask[flat.abs().argsort(descending=True, stable=True)[:kept]] = 1
        return (flat * mask).view_as(change)

    def add(self, changes: Tensor, weights: Sequence[float]) -> Tensor:
        agrees = _has_common_sign(changes)
        factors = torch.tensor(weights).view(-1, *[1] * (changes.ndim - 1))
        total = (agrees * factors).sum(dim=0)
        total = torch.where(total.abs() < NEAR_ZERO, 1, total)
        return (changes * agrees).sum(dim=0) / total


class DareConfig(_FromBaseConfig):
    """Task arithmetic with a random part of the changes, scaled up accordingly (2311.03099)."""

    kind: Literal["dare"] = "dare"
    density: Density = 0.5
    """Probability that an element of a model's change is kept; it is then divided by this."""
    common_sign: bool = False
    """True to add only changes of one sign per element: that of the weighted sum, as in TIES. The
    result is their sum, not their mean (`dare_ties` of mergekit)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice."""

    def trim(self, change: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(self.seed, seed) >> 1)
        kept = torch.rand(change.shape, generator=generator) < self.density
        return change * kept / self.density

    def add(self, changes: Tensor, weights: Sequence[float]) -> Tensor:
        del weights
        return (changes * _has_common_sign(changes) if self.common_sign else changes).sum(dim=0)


MethodConfig = Annotated[
    LinearConfig | SlerpConfig | TaskArithmeticConfig | TiesConfig | DareConfig,
    Field(discriminator="kind"),
]


def _direction(tensor: Tensor) -> Tensor:
    norm = tensor.norm()
    return tensor / norm if norm > NEAR_ZERO else tensor


def _has_common_sign(changes: Tensor) -> Tensor:
    """True for changes with the sign of the sum over the models; a sum of 0 counts as positive."""
    sign = torch.where(changes.sum(dim=0) >= 0, 1.0, -1.0)
    return changes.sign() == sign


class PartConfig(Config):
    """A model to merge."""

    model: str
    """A run, a Hugging Face directory or hub id, a GGUF file, or a folder of `convert`."""
    weight: float = 1.0
    """The weight of this model; an error with `slerp`, which has `t`."""
    checkpoints: int | None = Field(default=None, ge=1)
    """Merge the newest checkpoints of a run, this many, each with the same weight. `train.keep`
    sets how many a run keeps. None: only the newest."""


class MergeRecipe(Config):
    """The recipe that `workhorse merge` reads: the models, and the method."""

    method: MethodConfig = LinearConfig()
    """How the weights of a tensor are merged."""
    models: tuple[PartConfig, ...]
    """The models. The tokenizer and the stop tokens come from `base`, or from the first model. If
    that has no chat template, they come from the first model with one."""
    base: str | None = None
    """The model that the others were trained from, for methods that add changes to it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights; `auto`: one that holds the values of all models and `base`."""

    @model_validator(mode="after")
    def _fits_together(self) -> "MergeRecipe":
        weighted = any(part.weight != 1 for part in self.models)
        if weighted and isinstance(self.method, SlerpConfig):
            raise ConfigError("slerp does not use weights; set method.t", "models")
        needs_base = isinstance(self.method, _FromBaseConfig)
        if needs_base != (self.base is not None):
            remedy = "set base to the model they were trained from" if needs_base else "remove it"
            raise ConfigError(f"base={self.base} does not fit {self.method.kind}; {remedy}")
        if not self.models:
            raise ConfigError("there are no models; name at least one", "models")
        weights = [part.weight for part in self.models]
        if getattr(self.method, "normalize", False) and abs(sum(weights)) < NEAR_ZERO:
            raise ConfigError(f"the weights {weights} add up to 0; change them", "models")
        return self


@dataclass(frozen=True)
class Parts:
    """The tensors to merge into one, in float32."""

    tensors: list[Tensor]
    """The tensor of each model, all of the same shape."""
    weights: list[float]
    base: Tensor | None
    """The tensor of the base model; None if the method needs none."""
    seeds: list[int]
    """A random seed for each tensor, from its name and the index of its model."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge."""

    path: Path
    method: str
    models: list[str]
    dtype: str
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    recipe: MergeRecipe,
    target: str | Path,
    to: Literal["hf", "workhorse"] = "hf",
    *,
    notify: Callable[[str], object] = warn_caller,
) -> Merged:
    """Merge models and write the result.

    Args:
        recipe: the models and the method.
        target: a new or empty folder.
        to: format of the result; see `convert`.
        notify: called with each warning of loading, and each difference of the models that the
            merged weights do not depend on.

    Raises:
        WorkhorseError: a model cannot be read, the models compute different functions of their
            weights or have different tokenizers, the format cannot represent them, or the target
            exists.
    """
    target = Path(target)
    check_new(target)
    parts = [expanded for part in recipe.models for expanded in _expanded(part)]
    if isinstance(recipe.method, SlerpConfig) and len(parts) != 2:  # noqa: PLR2004
        raise WorkhorseError(f"slerp merges two models, not {len(parts)}; list two")
    read = partial(load, device="cpu", execution="reference", notify=notify)
    models = [read(part.model) for part in parts]
    for model in models:
        if adapters_of(model.decoder):
            raise WorkhorseError(
                f"{model.name} is an adapter; write it with its base: "
                f"workhorse convert {model.name} FOLDER --to workhorse"
            )
    base = None if recipe.base is None else read(recipe.base)
    first = base or models[0]
    # A base that cannot chat must not take the template and the stop tokens from chat models.
    speaker = next((one for one in (first, *models) if _has_template(one)), first)
    for model in models:
        _check_alike(first, model)
        for name, owner in _differences(first, speaker, model):
            notify(f"{model.name} has another {name}; the merged model has {owner.name}'s")
    merged = _MergedWeights(recipe.method, models, [part.weight for part in parts], base)
    dtypes = [one.decoder.embedding.tokens.weight.dtype for one in (first, *models)]
    dtype = reduce(torch.promote_types, dtypes)
    if recipe.dtype != "auto":
        dtype = getattr(torch, recipe.dtype)
    family = None
    if to == "hf":
        family = first.family or find_family(first.config)
    write = write_model if family is None else partial(write_huggingface, family=family)
    write(
        target,
        first.decoder,
        tokenizer=whole_tokenizer(speaker),
        dtype=dtype,
        stop_tokens=speaker.stop_tokens,
        weights=merged,
    )
    names = [part.model for part in parts]
    total = count_parameters(first.config)["total"]
    return Merged(target, recipe.method.kind, names, dtype_name(dtype), total)


class _MergedWeights(Mapping[str, Tensor]):
    """Weights by name, each merged when it is read."""

    def __init__(
        self,
        method: MethodConfig,
        models: Sequence[Model],
        weights: list[float],
        base: Model | None,
    ) -> None:
        self.method = method
        self.models = [weights_of(model.decoder) for model in models]
        self.weights = weights
        self.base = None if base is None else weights_of(base.decoder)

    def __getitem__(self, name: str) -> Tensor:
        return self.method.merge(
            Parts(
                [weights[name].float() for weights in self.models],
                self.weights,
                None if self.base is None else self.base[name].float(),
                [derive(number, name) for number in range(len(self.models))],
            )
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.models[0])

    def __len__(self) -> int:
        return len(self.models[0])


def _expanded(part: PartConfig) -> list[PartConfig]:
    """Replace a run with several checkpoints by these checkpoints."""
    if part.checkpoints is None:
        return [part]
    run = RunDirectory.at(Path(part.model))
    if not run.exists:
        raise WorkhorseError(f"{part.model} is not a run, so it has no checkpoints; omit them")
    store = run.store()
    steps = store.steps()[-part.checkpoints :]
    if len(steps) < part.checkpoints:
        raise WorkhorseError(
            f"{part.model} has {len(steps)} checkpoints, fewer than checkpoints={part.checkpoints};"
            " reduce it, or keep more with train.keep"
        )
    return [
        PartConfig(model=str(store.path(step)), weight=part.weight / len(steps)) for step in steps
    ]


def _has_template(model: Model) -> bool:
    return model.tokenizer is not None and bool(model.tokenizer.chat_templates)


def _check_alike(first: Model, other: Model) -> None:
    """Check that two models compute the same function of their weights, and of strings."""
    own, found = ([tuple(w.shape) for w in one.decoder.parameters()] for one in (first, other))
    for difference in compare_plain(plain(other.config), plain(first.config)):
        if difference.path != "max_seq_len" or own != found:
            raise WorkhorseError(
                f"{other.name} and {first.name} compute different functions: {difference}; merge "
                "models that differ only in their weights"
            )
    if first.tokenizer is None or other.tokenizer is None:
        return
    own, found = map(_encoding, (first.tokenizer, other.tokenizer))
    if parts := [part for part in own if own[part] != found[part]]:
        raise WorkhorseError(
            f"the tokenizers of {first.name} and {other.name} differ in {' and '.join(parts)}; "
            "merge models with one tokenizer"
        )


def _encoding(tokenizer: Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer that determine the ids of a string."""
    definition = json.loads(tokenizer.definition)
    parts = {part: definition[part] for part in ("normalizer", "pre_tokenizer", "model")}
    return {"vocabulary": tokenizer.vocabulary, **parts}


def _differences(first: Model, speaker: Model, other: Model) -> Iterator[tuple[str, Model]]:
    """The properties in which a model differs from the result, and the model that has them."""
    if other.config.max_seq_len != first.config.max_seq_len:
        yield "max_seq_len", first
    if speaker.tokenizer is None or other.tokenizer is None:
        return
    if other.tokenizer.chat_templates not in ({}, speaker.tokenizer.chat_templates):
        yield "chat template", speaker
    if other.prefix != speaker.prefix:
        yield "token before a document", speaker
    ends, kept = ({*(one.stop_tokens or [one.text.eos_id])} for one in (other, speaker))
    if ends - kept or (_has_template(other) and ends != kept):
        yield "set of stop tokens", speaker
