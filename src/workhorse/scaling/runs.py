"""Points of a scaling law from run directories and recipes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.dial import read_recipe
from workhorse.errors import WorkhorseError
from workhorse.models.flops import FLOPS_PER_PARAMETER, flops_per_token
from workhorse.scaling.forms import Point
from workhorse.train import Recipe, read_metrics, with_init
from workhorse.train.estimate import vocab_size_of


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
    text: dict[str, Any] = {}
    first = ""
    for run in runs:
        directory = RunDirectory(Path(run))
        if not directory.exists:
            raise WorkhorseError(f"{run} is not a run directory; give folders that train made")
        recipe = directory.recipe()
        own = {name: recipe[name] for name in ("data", "tokenizer")}
        own["data"] = {key: value for key, value in own["data"].items() if key != "cache_dir"}
        text, first = text or own, first or str(run)
        if own != text:
            raise WorkhorseError(
                f"{run} has other data or another tokenizer than {first}, so their losses cannot "
                "be compared; leave one of them out"
            )
        points.append(_point(directory))
    return points


def _point(directory: RunDirectory) -> Point:
    last: dict[str, Any] = {event["kind"]: event for event in read_metrics(directory.metrics_file)}
    validation, step = last.get("validation"), last.get("step")
    if not validation or not validation["whole"] or not step or validation["step"] != step["step"]:
        raise WorkhorseError(
            f"{directory.path} has no loss of the whole held-out text after its last step; let it "
            "end, or leave it out"
        )
    parameters = last["start"]["flops_per_token"] / FLOPS_PER_PARAMETER
    return Point(parameters, step["tokens"], validation["loss"], directory.path.name)


def point_of(recipe: Recipe) -> Point:
    """Where a recipe's run would stand; its loss is not known."""
    config = recipe.decoder_config(vocab_size_of(recipe))
    flops = flops_per_token(config.build(device="meta"), recipe.train.seq_len)
    tokens = recipe.train.steps * recipe.train.tokens_per_step
    return Point(flops / FLOPS_PER_PARAMETER, tokens, name=recipe.name)
