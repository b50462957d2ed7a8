"""Training: recipes, objectives, the training step and its loop; `workhorse.run` runs them.

The names are imported when they are first used, so that a recipe can be read without PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.train.loop import DivergedError, StopSignals
    from workhorse.train.recipe.overrides import on_workers, override_recipe
    from workhorse.train.recipe.recipe import Recipe, with_init
    from workhorse.train.recipe.training import TrainConfig
    from workhorse.train.report.metrics import Event, read_metrics

__all__ = [
    "DivergedError",
    "Event",
    "Recipe",
    "StopSignals",
    "TrainConfig",
    "on_workers",
    "override_recipe",
    "read_metrics",
    "with_init",
]

_MODULES = {
    **dict.fromkeys(("DivergedError", "StopSignals"), "loop"),
    **dict.fromkeys(("on_workers", "override_recipe"), "recipe.overrides"),
    **dict.fromkeys(("Recipe", "with_init"), "recipe.recipe"),
    **dict.fromkeys(("Event", "read_metrics"), "report.metrics"),
    "TrainConfig": "recipe.training",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"workhorse.train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
