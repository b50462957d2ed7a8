"""The command that begins a new run, for changes that a resumed run cannot make."""

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from workhorse.checkpoints import RunDirectory
from workhorse.config.base import Config
from workhorse.config.overrides import written
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.parallel.processes import environment
from workhorse.train.recipe.recipe import Recipe

Settings = Sequence[tuple[str, Any]]
"""Dotted names with plain values."""

FROM_THE_BEGINNING = ("train.seed", "tokenizer", "init")
"""Settings that determine the initial weights or the tokens: weights cannot be taken over."""


def fresh(run: RunDirectory, recipe: Recipe, changed: Sequence[str]) -> bool:
    """Whether a recipe with these changes cannot start from the run's weights."""
    if any(name.startswith(FROM_THE_BEGINNING) for name in changed):
        return True
    if not any(name.startswith("model") for name in changed):
        return False
    try:
        trained = run.config  # the recipe beside it may have been edited since
        return _shapes(trained) != _shapes(recipe.decoder_config(trained.vocab_size))
    except WorkhorseError:
        return True


def from_weights(run: RunDirectory, settings: Settings) -> Settings:
    """The settings of a run that starts from the weights of another and has its tokenizer."""
    tokenizer = {"kind": "file", "path": str(run.tokenizer_folder)}
    # A preset says the architecture, and so does the model to start from.
    model = [("model", {})] if "preset" in run.recipe()["model"] else []
    return [*model, *settings, ("tokenizer", tokenizer), ("init", str(run.path))]


def command(run: RunDirectory, settings: Settings) -> str:
    """`workhorse train` on a run's own recipe with settings, into an unused folder."""
    words = ["workhorse", "train", str(run.path)]
    words += [f"{name}={written(value)}" for name, value in settings]
    return shlex.join([*words, "--out", _free_name(run), *environment.workers()])


def spare(recipe: Recipe, name: str, value: Any) -> Any:
    """A setting's value; of a section only the keys that are not defaults."""
    section: Any = recipe
    for part in name.split("."):
        section = getattr(section, part, None)
    if not isinstance(section, Config):
        return value
    kind = {"kind": value["kind"]} if "kind" in value else {}
    return kind | section.model_dump(mode="json", exclude_defaults=True)


def _shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    decoder = config.build(device="meta")
    return {name: weight.shape for name, weight in decoder.named_parameters()}


def _free_name(run: RunDirectory) -> str:
    number = 2
    while (path := run.path.with_name(f"{run.path.name}-{number}")).exists():
        number += 1
    return str(path)
