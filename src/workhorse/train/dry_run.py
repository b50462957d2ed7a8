"""What training a recipe would do and take, before any of it is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workhorse.train.check import remarks_on
from workhorse.train.estimate import estimate
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.run import rehearse, why_taken


def dry_run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """What `train` would do with a recipe, and what it would take. Writes nothing.

    Args:
        recipe: to be trained.
        out: the run directory; None for `runs/NAME`, of which `tell` hears if it is taken.
        resume: go on with the run in `out`.
        tell: called with each line that `train` would give as a notice, before steps are timed.

    Returns:
        What `estimate` gives; and, unless `runs/NAME` is taken, `run_directory`, the `step` after
        which the run would go on (0: it would begin) and the `changes` of the recipe since.

    Raises:
        WorkhorseError: `train` would refuse before its first step.
    """
    folder = Path("runs") / recipe.name if out is None else Path(out)
    taken = "" if resume or out is not None else why_taken(folder)
    if taken:
        notices, place = [taken, *remarks_on(recipe)], {}
    else:
        at = rehearse(recipe, folder, resume=resume)
        notices = list(at.notices)
        if not resume:
            notices.append(f"{folder} is free")
        elif at.step < recipe.train.steps:
            notices.append(f"{folder}: would go on after step {at.step:,}")
        changes = [str(change) for change in at.changes]
        place = {"run_directory": folder, "step": at.step, "changes": changes}
    for line in notices:
        tell(line)
    return estimate(recipe) | place
