"""Random JSON schemas, and the length of the shortest value of each."""

import json
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


def shortest(schema: dict[str, Any]) -> int:
    """Number of bytes of the shortest value of a schema of `random_schema`."""

    def size(value: object) -> int:
        return len(json.dumps(value, separators=(",", ":")))

    if "anyOf" in schema:
        return min(map(shortest, schema["anyOf"]))
    if "properties" in schema:
        parts, names = schema["properties"], schema["required"]
        members = [size(name) + 1 + shortest(parts[name]) for name in names]
        return 2 + sum(members) + max(0, len(members) - 1)
    if "items" in schema:
        least = schema["minItems"]
        return 2 + least * shortest(schema["items"]) + max(0, least - 1)
    values: Any = {"string": [""], "boolean": [True], "null": [None]}.get(schema.get("type"), [0])
    if "pattern" in schema:
        values = ["no" if "no" in schema["pattern"] else "0000"]
    if "minimum" in schema:
        values = range(schema["minimum"], schema["maximum"] + 1)
    return min(map(size, schema.get("enum", [schema["const"]] if "const" in schema else values)))
