"""Training: from a recipe to a run directory."""

from workhorse.train.check import recipe_warnings
from workhorse.train.dry_run import dry_run, estimate
from workhorse.train.loop import DivergedError, StopSignals
from workhorse.train.recipe.overrides import on_workers, override_recipe
from workhorse.train.recipe.recipe import Recipe, with_init
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.report.metrics import Event, read_metrics
from workhorse.train.resume import Change, Resumption, resumed_recipe
from workhorse.train.run import TrainResult, check_run, reason_not_free, train

__all__ = [
    "Change",
    "DivergedError",
    "Event",
    "Recipe",
    "Resumption",
    "StopSignals",
    "TrainConfig",
    "TrainResult",
    "check_run",
    "dry_run",
    "estimate",
    "on_workers",
    "override_recipe",
    "read_metrics",
    "reason_not_free",
    "recipe_warnings",
    "resumed_recipe",
    "train",
    "with_init",
]
