"""JSON that a stranger wrote: read within bounds of time and memory, and only if it is exact."""

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from workhorse.errors import WorkhorseError, shown
from workhorse.files.plain import decoded, read_bytes

MAX_DEPTH = 64
MAX_VALUES = 850_000
"""Each costs Python up to about 70 bytes beyond its text, and a microsecond. The header of a
hundred thousand matrices, more than any published file's, has eight hundred thousand."""


def read_json(path: Path, *, limit: int = 4_000_000) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: a plain file in its folder.
        limit: bytes it may have.

    Raises:
        WorkhorseError: as `read_bytes`; or `parse_json` refuses.
    """
    return parse_json(read_bytes(path, limit=limit), str(path))


def parse_json(raw: bytes, what: str, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """An object of JSON.

    Args:
        raw: UTF-8 text.
        what: its name in errors.
        max_values: entries of all its objects and lists together.

    Raises:
        WorkhorseError: it is no JSON object, has too many values or is nested deeper than
            `MAX_DEPTH`, or says something twice or in no number a float can hold.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > max_values:
        raise WorkhorseError(f"{what} holds more than {max_values} values; it is not a model's")
    text = decoded(raw, what)
    try:
        with collector_paused():
            data = json.loads(
                text,
                object_pairs_hook=_without_repeats,
                parse_float=_finite,
                parse_constant=_refuse_constant,
            )
    except RecursionError:
        raise WorkhorseError(f"{what} is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]  # what Python advises is not for its users' users
        raise WorkhorseError(f"{what} is not valid JSON: {reason}") from None
    if not isinstance(data, dict):
        raise WorkhorseError(f"{what} holds {shown(data)}, not a JSON object")
    if _depth(data) > MAX_DEPTH:
        raise WorkhorseError(f"{what} is nested deeper than {MAX_DEPTH}")
    return data


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make much plain data that has no cycles without a search for them at every turn.

    The search takes twice as long as the reading of a large file.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} stands twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is too large for a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _depth(data: dict[str, Any]) -> int:
    """Levels of objects and lists."""
    level: list[Any] = [data]
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            value
            for group in level
            for value in (group.values() if isinstance(group, dict) else group)
            if isinstance(value, (dict, list))
        ]
    return depth
