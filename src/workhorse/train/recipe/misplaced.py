"""Messages for a misplaced or missing key of a recipe: where it belongs, how it is written."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from workhorse.config.base import ConfigError, parse_yaml
from workhorse.train.recipe.reference import NAME, all_keys, configs_at, examples

LISTED = 3
"""The most places that an error names."""


def with_its_place(error: ConfigError, fields: Any) -> ConfigError:
    """An error about a key that also says where the key belongs, or how it is written.

    Args:
        error: as the configs raised it; returned unchanged if there is nothing to add.
        fields: of the recipe.
    """
    if error.missing_key:
        return _with_an_example(error, fields)
    key, place = error.unknown_key, error.path
    if not key:
        return error
    kinds = [kind for kind, config in configs_at(place).items() if key in config.model_fields]
    if kinds:
        reason = f"unknown key {key!r}, which belongs to kind: {' or '.join(sorted(kinds))}"
        return ConfigError(f"{reason}; choose that, or leave {key} out", place)
    places = places_of(key, fields)
    if "did you mean" not in error.reason:
        places = places or [full for name in _near(key) for full in places_of(name, fields)]
    inside = [full for full in places if place and full.startswith(f"{place}.")]
    if not places:
        return error
    return ConfigError(f"unknown key {key!r}; did you mean {listed(inside or places)}?", place)


def _with_an_example(error: ConfigError, fields: Any) -> ConfigError:
    """An error about a missing key that shows one, from the reference's examples."""
    key, place = error.missing_key, error.path
    section = _section_at(place, fields)
    kind = section.get("kind") if isinstance(section, Mapping) else None
    configs = configs_at(place)
    possible = [configs[kind]] if kind in configs else list(configs.values())
    for text in (text for config in possible for text in examples().get(config.__name__, ())):
        if key in (example := parse_yaml(text)):
            written = yaml.safe_dump({key: example[key]}, default_flow_style=True, sort_keys=False)
            where = f"{place}.{key}".lstrip(".")
            return ConfigError(
                f"{key!r} is missing; write one such as {' '.join(written.split())[1:-1]} "
                f"(see workhorse recipe {where})",
                place,
            )
    return error


def _section_at(place: str, fields: Any) -> Any:
    """The value at a dotted place of a recipe; None if there is none."""
    for part in place.split(".") if place else ():
        fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def places_of(key: str, fields: Any = None) -> list[str]:
    """The dotted keys of that name, or of that abbreviation (`lr`), in a recipe; nearest first.

    Args:
        key: a name without a dot.
        fields: of the recipe, whose own names stand in the keys; where it has none, `NAME` does.
    """
    last = {full: full.rpartition(".")[2] for full in all_keys()}
    found = [full for full, name in last.items() if name == key]
    found = found or [full for full, name in last.items() if _initials(name) == key]
    named = [one for full in found for one in _named(full.split("."), fields)]
    return sorted(dict.fromkeys(named), key=lambda full: (full.count("."), full))


def listed(places: list[str]) -> str:
    """A few of the places, in words."""
    shown = places[:LISTED]
    more = len(places) - len(shown)
    if more:
        return f"{', '.join(shown)} or one of {more} more"
    return " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def _initials(name: str) -> str:
    """`lr` of `learning_rate`; empty for a single word."""
    words = name.split("_")
    return "".join(word[0] for word in words if word) if len(words) > 1 else ""


def _near(key: str) -> list[str]:
    names = {full.rpartition(".")[2] for full in all_keys()}
    return difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.8)


def _named(parts: list[str], fields: Any) -> Iterator[str]:
    """A dotted key with the recipe's own names where the reference has `NAME`."""
    if NAME not in parts:
        yield ".".join(parts)
        return
    at = parts.index(NAME)
    inside = _section_at(".".join(parts[:at]), fields)
    names = list(inside) if isinstance(inside, Mapping) else []
    for name in names or [NAME]:
        yield ".".join([*parts[:at], str(name), *parts[at + 1 :]])
