"""Runs: from a recipe to a trained model in a run directory."""

from workhorse.run.check import recipe_warnings
from workhorse.run.dry_run import dry_run, estimate
from workhorse.run.resume import Change, Resumption, resumed_recipe
from workhorse.run.run import TrainResult, check_run, reason_not_free, train

__all__ = [
    "Change",
    "Resumption",
    "TrainResult",
    "check_run",
    "dry_run",
    "estimate",
    "reason_not_free",
    "recipe_warnings",
    "resumed_recipe",
    "train",
]
