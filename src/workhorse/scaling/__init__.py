"""Scaling laws: what finished runs say about the loss of a larger one."""

from workhorse.scaling.account import account, recipe_at
from workhorse.scaling.forms import FORMS, Point
from workhorse.scaling.law import Law, Prediction, fit_law
from workhorse.scaling.runs import point_of, read_points

__all__ = [
    "FORMS",
    "Law",
    "Point",
    "Prediction",
    "account",
    "fit_law",
    "point_of",
    "read_points",
    "recipe_at",
]
