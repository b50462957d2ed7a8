"""Places in a config as plain data: dotted paths, as `block.attention.n_heads`."""

from collections.abc import Callable
from typing import Any

from workhorse.models.huggingface.family import MISSING, compare_plain, look_up, plain

__all__ = ["MISSING", "Data", "Place", "compare_plain", "look_up", "plain", "put"]

WINDOW = "attention.window"
THETA = "attention.position.theta"
SCALING = "attention.position.scaling"
FRACTION = "attention.position.fraction"

Data = dict[str, Any]
Place = str | Callable[[Data], object]
"""Where a value stands, or a function that computes it from the whole config."""


def put(data: Data, place: str, value: object) -> None:
    """Set the value at a place, if its parent exists."""
    *outer, last = place.split(".")
    inner: Any = data
    for part in outer:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict) and last in inner:
        inner[last] = value
