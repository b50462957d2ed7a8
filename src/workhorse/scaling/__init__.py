"""Scaling laws: predict the loss of larger runs from finished ones."""

from workhorse.scaling.law import FORMS, Estimate, Law, Point, fit_law
from workhorse.scaling.laws import fit_laws, point_of, read_points, recipe_at

__all__ = [
    "FORMS",
    "Estimate",
    "Law",
    "Point",
    "fit_law",
    "fit_laws",
    "point_of",
    "read_points",
    "recipe_at",
]
