"""Points of a scaling law from run directories and recipes."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.config.dial import read_recipe
from workhorse.config.errors import LARGEST, as_written
from workhorse.errors import WorkhorseError
from workhorse.models.flops import FLOPS_PER_PARAMETER, flops_per_token
from workhorse.scaling.forms import Point
from workhorse.train import Recipe, read_metrics, with_init
from workhorse.train.estimate import vocab_size_of

DECAYED = 0.5
"""The most that may be left of the learning rate at the end."""


def recipe_at(path: str | Path) -> Recipe:
    """The recipe in a file, of the dial (`depth-N`), or of a run directory."""
    path = Path(path)
    return Recipe.from_dict(with_init(read_recipe(path / "recipe.yaml" if path.is_dir() else path)))


def read_points(runs: Iterable[str | Path]) -> list[Point]:
    """A point of every run.

    Raises:
        WorkhorseError: one is no run, has not ended, or has other data or another tokenizer.
    """
    points: list[Point] = []
    first: tuple[Recipe, str] | None = None
    seen: set[Path] = set()
    for run in runs:
        directory = RunDirectory(Path(run))
        if not directory.exists:
            raise WorkhorseError(f"{run} is not a run directory; give folders that train made")
        if (place := Path(run).resolve()) in seen:
            raise WorkhorseError(f"{run} is given twice; leave one of them out")
        seen.add(place)
        recipe = Recipe.from_dict(directory.recipe())
        first = first or (recipe, str(run))
        check_text(recipe, str(run), *first)
        _check_whole(recipe, str(run))
        points.append(_point(directory, recipe.train.length))
    return points


def _check_whole(recipe: Recipe, name: str) -> None:
    """Refuse a run that was trained before, or whose learning rate did not decay.

    Raises:
        WorkhorseError: it is one.
    """
    if recipe.init is not None:
        raise WorkhorseError(
            f"{name} began from the weights of {recipe.init}, which saw other tokens before; leave "
            "it out"
        )
    train = recipe.train
    if train.steps is None:
        raise WorkhorseError(f"{name} has not begun to train; leave it out")
    if (last := train.schedule.factor(train.length, train.length)) > DECAYED:
        raise WorkhorseError(
            f"{name} ended with {last:.0%} of its learning rate, so its loss is not that of a run "
            "of that length; let its schedule decay, or leave it out"
        )


def check_text(recipe: Recipe, name: str, other: Recipe, beside: str) -> None:
    """Refuse a recipe whose losses are of other text, or of other tokens, than those of another.

    Raises:
        WorkhorseError: they are.
    """
    own, wanted = (
        (one.data.replace(cache_dir=None), one.tokenizer.to_dict()) for one in (recipe, other)
    )
    if own != wanted:
        raise WorkhorseError(
            f"{name} has other data or another tokenizer than {beside}, so their losses cannot "
            "be compared; leave one of them out"
        )


def _point(directory: RunDirectory, steps: int) -> Point:
    last: dict[str, Any] = {event["kind"]: event for event in read_metrics(directory.metrics_file)}
    start, step, validation = (last.get(kind, {}) for kind in ("start", "step", "validation"))
    done = step.get("step", 0)
    if done < steps:
        raise WorkhorseError(
            f"{directory.path} has {done} of {steps} steps; let it end, or leave it out"
        )
    if not validation.get("whole") or validation["step"] != done:
        raise WorkhorseError(
            f"{directory.path} has no loss of the whole held-out text after its last step; let it "
            "end, or leave it out"
        )
    flops, tokens = start.get("flops_per_token"), step.get("tokens")
    loss = validation.get("loss")
    for name, figure in (("FLOPs of a token", flops), ("tokens", tokens)):
        if not _is_size(figure):
            raise WorkhorseError(
                f"{directory.path} has {as_written(figure)} for its {name}; leave it out"
            )
    if not _is_size(loss):
        raise WorkhorseError(
            f"{directory.path} has {as_written(loss)} for its loss after {done} steps, and "
            "only losses above 0 can be fitted; leave it out"
        )
    return Point(flops / FLOPS_PER_PARAMETER, tokens, loss, directory.path.name)


def _is_size(value: Any) -> bool:
    """Whether a figure of a file is above 0, as parts of it are, and not beyond every count."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and sys.float_info.min <= value <= LARGEST


def point_of(recipe: Recipe) -> Point:
    """Where a recipe's run would stand; its loss is not known."""
    if recipe.train.steps is None:
        raise WorkhorseError(f"{recipe.name} has train.minutes; give it train.steps")
    config = recipe.decoder_config(vocab_size_of(recipe))
    flops = flops_per_token(config.build(device="meta"), recipe.train.seq_len)
    tokens = recipe.train.length * recipe.train.tokens_per_step
    return Point(flops / FLOPS_PER_PARAMETER, tokens, name=recipe.name)
