"""Fit all forms of scaling laws to run directories, and return constants and predicted losses."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.config.errors import LARGEST, as_written
from workhorse.errors import WorkhorseError
from workhorse.models.describe import FLOPS_PER_PARAMETER, flops_per_token
from workhorse.plan.subject import Parametric
from workhorse.run.dry_run import vocab_size_of
from workhorse.scaling.law import (
    DRAWS,
    FORMS,
    SLOWEST,
    STEEPEST,
    Hoffmann,
    Law,
    Point,
    check_points,
    fit_law,
    too_few,
)
from workhorse.train import Recipe, read_metrics, with_init
from workhorse.train.recipe.depth import read_recipe

DECAYED = 0.5
"""Maximum learning rate at the end of a run, as a fraction of its base learning rate. The loss of a
run that ends with a higher rate is not final, so it is not fitted."""


def recipe_at(path: str | Path) -> Recipe:
    """Read a recipe from a file, from a run directory, or by its built-in name `depth-N`."""
    path = Path(path)
    return Recipe.from_dict(with_init(read_recipe(path / "recipe.yaml" if path.is_dir() else path)))


def read_points(runs: Iterable[str | Path]) -> list[Point]:
    """Read the sizes and the loss of each run.

    Args:
        runs: run directories of finished runs.

    Raises:
        WorkhorseError: a path is not a run directory or is given twice, a run is not finished, or
            runs differ in data or tokenizer.
    """
    points: list[Point] = []
    first: tuple[Recipe, str] | None = None
    seen: set[Path] = set()
    for run in runs:
        directory = RunDirectory(Path(run))
        if not directory.exists:
            raise WorkhorseError(f"{run} is not a run directory; give folders made by train")
        if (place := Path(run).resolve()) in seen:
            raise WorkhorseError(f"{run} is given twice; give it once")
        seen.add(place)
        recipe = Recipe.from_dict(directory.recipe())
        first = first or (recipe, str(run))
        check_text(recipe, str(run), *first)
        _check_whole(recipe, str(run))
        points.append(_point(directory, recipe.train.length))
    return points


def _check_whole(recipe: Recipe, name: str) -> None:
    """Check that a run's loss represents a full training of its length, from random weights."""
    if recipe.init is not None:
        raise WorkhorseError(
            f"{name} began from the trained weights of {recipe.init}; omit this run"
        )
    train = recipe.train
    if train.minutes is not None:
        raise WorkhorseError(f"{name} has not begun to train; omit this run")
    if (last := train.schedule.factor(train.length, train.length)) > DECAYED:
        raise WorkhorseError(
            f"{name} ended with {last:.0%} of its learning rate, so its loss does not represent a "
            "full run of that length; omit this run"
        )


def check_text(recipe: Recipe, name: str, other: Recipe, beside: str) -> None:
    """Check that two recipes have the same data and tokenizer, so that losses can be compared.

    Args:
        recipe: the recipe to check.
        name: its name for the error.
        other: the recipe to compare with.
        beside: the other recipe's name for the error.

    Raises:
        WorkhorseError: data or tokenizer differ.
    """
    own, wanted = (
        (one.data.replace(cache_dir=None), one.tokenizer.to_dict()) for one in (recipe, other)
    )
    if own != wanted:
        raise WorkhorseError(
            f"{name} has other data or another tokenizer than {beside}, so their losses cannot "
            "be compared; omit one"
        )


def _point(directory: RunDirectory, steps: int) -> Point:
    last: dict[str, Any] = {event["kind"]: event for event in read_metrics(directory.metrics_file)}
    start, step, validation = (last.get(kind, {}) for kind in ("start", "step", "validation"))
    done = step.get("step", 0)
    if done < steps:
        raise WorkhorseError(
            f"{directory.path} has {done} of {steps} steps; finish the run, or omit it"
        )
    if not validation.get("whole") or validation["step"] != done:
        raise WorkhorseError(
            f"{directory.path} has no loss of the whole validation set after its last step; finish "
            "the run, or omit it"
        )
    flops, tokens = start.get("flops_per_token"), step.get("tokens")
    loss = validation.get("loss")
    for name, figure in (("FLOPs per token", flops), ("tokens", tokens)):
        if not _is_size(figure):
            raise WorkhorseError(
                f"{directory.path} has {as_written(figure)} as its {name}; omit this run"
            )
    if not _is_size(loss):
        raise WorkhorseError(
            f"{directory.path} has {as_written(loss)} as its loss after {done} steps, but only "
            "losses above 0 can be fitted; omit this run"
        )
    return Point(flops / FLOPS_PER_PARAMETER, tokens, loss, directory.path.name)


def _is_size(value: Any) -> bool:
    """True if a value is a number above 0, neither subnormal nor above `LARGEST`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and sys.float_info.min <= value <= LARGEST


def point_of(recipe: Recipe) -> Point:
    """The sizes of the run that a recipe describes, as a point without a loss.

    Raises:
        WorkhorseError: the recipe has `train.minutes`.
    """
    if recipe.train.minutes is not None:
        raise WorkhorseError(
            f"{recipe.name} has train.minutes, so its number of tokens is unknown; set train.steps "
            "instead"
        )
    config = recipe.decoder_config(vocab_size_of(recipe))
    flops = flops_per_token(config.build(device="meta"), recipe.train.seq_len)
    tokens = recipe.train.length * recipe.train.tokens_per_step
    return Point(flops / FLOPS_PER_PARAMETER, tokens, name=recipe.name)


def fit_laws(
    runs: Iterable[str | Path], recipes: Sequence[Recipe] = (), draws: int = DRAWS
) -> dict[str, Any]:
    """Fit every form of scaling law to runs, and predict the losses of recipes.

    Args:
        runs: run directories, all with the same data and tokenizer.
        recipes: recipes whose losses are predicted.
        draws: number of bootstrap fits per law, for the 95 % intervals.

    Returns:
        `runs`: the fields of `Point` and `flops` for each run, sorted by FLOPs.
        `laws`: for each fitted law, `name`, `written` (the formula), `constants` (`value`, `low`
        and `high` by name), `error` (relative error of a run's loss), `predictions` (`name`,
        `loss`, `low` and `high` of each recipe) and `optimum`: the compute-optimal `parameters`
        and `tokens` for `flops`, the largest FLOPs of any run or recipe. `optimum` is None if the
        law does not determine it.
        `left_out`: the reasons why laws were not fitted, by the law's name.

    Raises:
        WorkhorseError: the runs cannot be compared, or are too few for any law.
    """
    runs = list(runs)
    points = sorted(read_points(runs), key=lambda point: (point.flops, point.loss, point.name))
    for recipe in recipes if runs else ():
        beside = Recipe.from_dict(RunDirectory(Path(runs[0])).recipe())
        check_text(recipe, recipe.name, beside, str(runs[0]))
    wanted = [point_of(recipe) for recipe in recipes]
    check_points(points)
    laws, left_out = [], {}
    for form in FORMS.values():
        if few := too_few(form, points):
            left_out[form.name] = few
            continue
        laws.append(_described(fit_law(form, points, draws), wanted))
    return {"runs": [_plain_point(point) for point in points], "laws": laws, "left_out": left_out}


def _described(law: Law, wanted: Sequence[Point]) -> dict[str, Any]:
    return {
        "name": law.form.name,
        "written": law.form.written,
        "constants": {name: value._asdict() for name, value in law.constants().items()},
        "error": law.error,
        "predictions": [_prediction(law, one) for one in wanted],
        "optimum": _optimum(law, max(point.flops for point in [*law.points, *wanted])),
    }


def _optimum(law: Law, flops: float) -> dict[str, float] | None:
    """The compute-optimal parameters and tokens for a number of FLOPs, by a fitted law.

    None if the form of the law has no such optimum, or if the fit does not determine it.
    """
    if not isinstance(law.form, Hoffmann):
        return None
    numbers = law.form.constants(law.theta, law.middle)
    own = Parametric(**{name.lower(): value for name, value in numbers.items()})
    if min(own.alpha, own.beta) < 1.01 * SLOWEST or max(own.alpha, own.beta) > 0.99 * STEEPEST:
        return None
    try:
        parameters, tokens = own.optimum(flops)
    except ArithmeticError:  # a term of the fitted law is 0 or negligible
        return None
    if min(parameters, tokens) < 1:
        return None
    return {"flops": flops, "parameters": parameters, "tokens": tokens}


def _prediction(law: Law, point: Point) -> dict[str, Any]:
    loss, low, high = law.predict(point)
    return {"name": point.name, "loss": loss, "low": low, "high": high}


def _plain_point(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "flops": point.flops}
