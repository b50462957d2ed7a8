"""Paths of fields in a config as plain data, dotted: `block.attention.n_heads`."""

from typing import Any

from workhorse.models.huggingface.family import MISSING, FieldPath, compare_plain, look_up, plain

__all__ = ["MISSING", "Data", "FieldPath", "compare_plain", "look_up", "plain", "put"]

WINDOW = "attention.window"
THETA = "attention.position.theta"
SCALING = "attention.position.scaling"
FRACTION = "attention.position.fraction"

Data = dict[str, Any]


def put(data: Data, path: str, value: object) -> None:
    """Set the value of a field, if its parent exists."""
    *outer, last = path.split(".")
    inner: Any = data
    for part in outer:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict) and last in inner:
        inner[last] = value
