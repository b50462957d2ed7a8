"""What training a recipe would do and need, without doing it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.train.check import remarks_on
from workhorse.train.estimate import estimate
from workhorse.train.minutes import as_begun
from workhorse.train.recipe.recipe import Recipe
from workhorse.train.run import rehearse, why_taken


def dry_run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """What `train` would do with a recipe, and the resources it would need. Writes nothing.

    Args:
        recipe: to be trained.
        out: the run directory; None for `runs/NAME`, with a line to `tell` if that is taken.
        resume: continue the run in `out`.
        tell: called with each line that `train` would emit as a notice, before steps are timed.

    Returns:
        The result of `estimate`; and, unless `runs/NAME` is taken, `run_directory`, the `step`
        after which the run would continue (0: it would begin) and the `changes` of the recipe;
        `seconds` are then those of the steps that are left.

    Raises:
        WorkhorseError: `train` would refuse before its first step.
    """
    folder = Path("runs") / recipe.name if out is None else Path(out)
    taken = "" if resume or out is not None else why_taken(folder)
    if taken:
        notices, place = [taken, *remarks_on(recipe)], {}
    else:
        at = rehearse(recipe, folder, resume=resume)
        recipe = as_begun(RunDirectory(folder), recipe) if resume else recipe
        notices = list(at.notices)
        if not resume:
            notices.append(f"{folder}: a new run would begin here")
        elif at.step < (recipe.train.steps or math.inf):
            notices.append(f"{folder}: would go on after step {at.step:,}")
        changes = [str(change) for change in at.changes]
        place = {"run_directory": folder, "step": at.step, "changes": changes}
    if (asked := recipe.parallel.processes) > 1:
        notices.append(f"takes {asked} processes, by --workers {asked} or torchrun")
    for line in notices:
        tell(line)
    found = estimate(recipe) | place
    steps = found["steps"]
    found["seconds"] *= max(0, steps - found.get("step", 0)) / steps
    return found
