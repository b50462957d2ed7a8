"""All the laws of some runs, and what each predicts, as plain data."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.plan.compute_optimal import Parametric
from workhorse.scaling.forms import FORMS, Hoffmann, Point
from workhorse.scaling.law import (
    DRAWS,
    SLOWEST,
    STEEPEST,
    Law,
    check_points,
    fit_law,
    too_few,
)
from workhorse.scaling.runs import check_text, point_of, read_points
from workhorse.train import Recipe


def fit_laws(
    runs: Iterable[str | Path], recipes: Sequence[Recipe] = (), draws: int = DRAWS
) -> dict[str, Any]:
    """Fit every form of law to runs, and predict the losses of recipes.

    Args:
        runs: run directories, all of one text and tokenizer.
        recipes: whose losses are to be predicted.
        draws: how many times each law is fitted again, for the intervals.

    Returns:
        `runs` (points, by FLOPs); `laws`, each with `name`, `written`, `constants` (`value`, `low`
        and `high` of each), `error` (relative, of a run), `predictions` (`name`, `loss`, `low`,
        `high`) and `optimum` (`parameters` and `tokens` for the most `flops` of any run or recipe;
        None where the form, or the runs, show no best division); `left_out` (why a law has too few
        runs, by its name).

    Raises:
        WorkhorseError: runs cannot be compared, or are too few for any law.
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
    return {"runs": [_point(point) for point in points], "laws": laws, "left_out": left_out}


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
    """How the FLOPs are best divided; None where the form, or the runs, show no best division."""
    if not isinstance(law.form, Hoffmann):
        return None
    numbers = law.form.constants(law.theta, law.middle)
    own = Parametric(**{name.lower(): value for name, value in numbers.items()})
    if min(own.alpha, own.beta) < 1.01 * SLOWEST or max(own.alpha, own.beta) > 0.99 * STEEPEST:
        return None
    try:
        parameters, tokens = own.optimum(flops)
    except ArithmeticError:  # one of the summands is 0, or as good as that
        return None
    if min(parameters, tokens) < 1:
        return None
    return {"flops": flops, "parameters": parameters, "tokens": tokens}


def _prediction(law: Law, point: Point) -> dict[str, Any]:
    loss, low, high = law.predict(point)
    return {"name": point.name, "loss": loss, "low": low, "high": high}


def _point(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "flops": point.flops}
