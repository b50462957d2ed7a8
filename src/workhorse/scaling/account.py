"""All laws of some runs, and what each predicts, in plain data."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workhorse.dial import read_recipe
from workhorse.plan.compute_optimal import Parametric
from workhorse.scaling.forms import FORMS, Point
from workhorse.scaling.law import DRAWS, Law, fit_law
from workhorse.scaling.runs import point_of, read_points
from workhorse.train import Recipe, with_init

FEWEST = 2
"""Runs more than a law has numbers."""


def account(
    runs: Iterable[str | Path], recipes: Sequence[Recipe] = (), draws: int = DRAWS
) -> dict[str, Any]:
    """The laws of some runs, and their predictions.

    Args:
        runs: run directories, all of one text and tokenizer.
        recipes: whose losses are to be predicted.
        draws: fits of each law to losses drawn anew, for the intervals.

    Returns:
        `runs` (points by size); `laws`, each with `name`, `written`, `constants` and `predictions`
        (`loss`, `low`, `high`), `error` (relative, of a run), `optimum` (of the largest FLOPs at
        hand, where the form tells); `left_out` (laws that there are too few runs for, and why).

    Raises:
        WorkhorseError: runs cannot be compared, or are too few for any law.
    """
    points = sorted(read_points(runs), key=lambda point: point.flops)
    wanted = [point_of(recipe) for recipe in recipes]
    laws, left_out = [], {}
    for key, form in FORMS.items():
        if len(points) < form.free + FEWEST:
            left_out[form.name] = f"{form.free + FEWEST} runs are the fewest, {len(points)} given"
            continue
        laws.append(_described(key, fit_law(form, points, draws), wanted))
    if not laws:
        fit_law(min(FORMS.values(), key=lambda form: form.free), points, draws)  # says why
    return {"runs": [_point(point) for point in points], "laws": laws, "left_out": left_out}


def _described(key: str, law: Law, wanted: Sequence[Point]) -> dict[str, Any]:
    constants = law.constants()
    predictions = [{"name": one.name, **law.predict(one)._asdict()} for one in wanted]
    flops = max(point.flops for point in [*law.points, *wanted])
    optimum = None
    if key == "hoffmann":
        best = Parametric(*(constant.loss for constant in constants.values())).optimum(flops)
        optimum = {"flops": flops, "parameters": best[0], "tokens": best[1]}
    return {
        "name": law.form.name,
        "written": law.form.written,
        "constants": {name: value._asdict() for name, value in constants.items()},
        "error": law.error,
        "predictions": predictions,
        "optimum": optimum,
    }


def _point(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "flops": point.flops}


def recipe_at(path: str | Path) -> Recipe:
    """The recipe in a file, of the dial, or of a run directory."""
    path = Path(path)
    return Recipe.from_dict(with_init(read_recipe(path / "recipe.yaml" if path.is_dir() else path)))
