"""Training: recipes, objectives, the training step and its loop; `workhorse.run` runs them."""

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
