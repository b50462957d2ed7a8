"""Random JSON schemas."""

import random
from typing import Any


def random_schema(pick: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema with the keywords that programs use, up to `depth` levels deep."""
    names = [f"{pick.choice('abcde')}{number}" for number in range(pick.randint(1, 4))]
    least = pick.randint(-9, 9)
    simple: list[dict[str, Any]] = [
        *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null")),
        {"enum": pick.sample(["red", "green", 1, 2.5, None, True, "a b"], 3)},
        {"const": pick.choice(["fixed", 7, None, ["a", 1]])},
        {"type": "string", "pattern": pick.choice(["^[a-f0-9]{4}$", "^(yes|no)$"])},
        {"type": "integer", "minimum": least, "maximum": least + pick.randint(0, 99)},
    ]
    if not depth or pick.random() < 0.6:
        return pick.choice(simple)
    parts = [random_schema(pick, depth - 1) for _ in names]
    nested: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": dict(zip(names, parts, strict=True)),
            "required": [name for name in names if pick.random() < 0.7],
            "additionalProperties": False,
        },
        {"type": "array", "items": parts[0], "minItems": len(parts) - 1, "maxItems": 4},
        {"anyOf": parts},
    ]
    return pick.choice(nested)
