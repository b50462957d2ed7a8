"""Training: a recipe in, a run directory out."""

from workhorse.train.estimate import estimate
from workhorse.train.metrics import Event, read_metrics
from workhorse.train.recipe import Recipe, TrainConfig
from workhorse.train.run import TrainResult, train

__all__ = ["Event", "Recipe", "TrainConfig", "TrainResult", "estimate", "read_metrics", "train"]
