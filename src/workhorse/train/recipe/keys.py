"""The dotted keys of a recipe, found from its config classes, and errors about misplaced keys.

The dotted key of a mapping in a recipe is called a place. The first argument of the functions is
the class `Recipe`, which calls one of them itself.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from workhorse.config.base import Config, ConfigError, OnResume, configs_in, marked, parse_yaml
from workhorse.nn import DecoderConfig

NAME = "NAME"
"""Placeholder in dotted keys for a name that the recipe chooses, such as the name of a block."""
LISTED = 3
"""Maximum number of dotted keys that an error lists."""


class Group(NamedTuple):
    """The config classes that one section describes."""

    title: str
    configs: tuple[type[Config], ...]
    rule: OnResume
    """The rule for resuming with changed values, for keys without their own `OnResume` mark."""


@cache
def recipe_configs(recipe: type[Config]) -> tuple[list[Group], dict[type[Config], list[str]]]:
    """Return all config classes of a recipe, grouped by section, and the dotted keys of each."""
    places: dict[type[Config], list[str]] = {}
    groups: list[Group] = []

    def visit(configs: tuple[type[Config], ...], place: str, rule: OnResume) -> None:
        new = tuple(config for config in configs if config not in places)
        if new:
            groups.append(Group(place, new, rule))
        for config in configs:
            known = places.setdefault(config, [])
            known += [] if place in known else [place]
        for config in new:
            for name, field in config.model_fields.items():
                inside = tuple(dict.fromkeys(configs_in(field.annotation)))
                named = f".{NAME}" if "dict" in str(field.annotation) else ""
                below = marked(field.metadata) or rule
                visit(inside, f"{place}.{name}{named}".lstrip("."), below)

    visit((recipe,), "", OnResume.NEW_RUN)
    visit((DecoderConfig,), "model", OnResume.NEW_RUN)
    return groups, places


def configs_at(recipe: type[Config], place: str) -> dict[str, type[Config]]:
    """Return the config classes that a dotted key accepts, by `kind`."""
    return {
        kind_of(config): config
        for config, places in recipe_configs(recipe)[1].items()
        if any(matches(known, place) for known in places)
    }


@cache
def examples() -> dict[str, tuple[str, ...]]:
    """Return the examples of each config, by class name."""
    text = resources.files("workhorse.train.recipe").joinpath("examples.yaml").read_text("utf-8")
    return {name: tuple(listed) for name, listed in parse_yaml(text).items()}


@cache
def synonyms() -> dict[str, list[str]]:
    """Return the names of keys in other programs, with the names or dotted keys of a recipe."""
    text = resources.files("workhorse.train.recipe").joinpath("synonyms.yaml").read_text("utf-8")
    return parse_yaml(text)


def kind_of(config: type[Config]) -> str:
    """Return the `kind` of a config class; empty if it has none."""
    return str(config.model_fields["kind"].default) if "kind" in config.model_fields else ""


def matches(place: str, key: str) -> bool:
    """Return True if two dotted keys match; `NAME` in the first stands for any name."""
    parts, words = place.split("."), key.split(".")
    return len(parts) == len(words) and all(
        part in (NAME, word) for part, word in zip(parts, words, strict=True)
    )


@cache
def all_keys(recipe: type[Config]) -> set[str]:
    """Return every dotted key of a recipe, with `NAME` for names that the recipe chooses."""
    return {
        f"{place}.{name}".lstrip(".")
        for config, places in recipe_configs(recipe)[1].items()
        for place in places
        for name in config.model_fields
        if name != "kind"
    }


def with_its_place(recipe: type[Config], error: ConfigError, fields: Any) -> ConfigError:
    """Improve an error about an unknown or missing key: name the right dotted key, or an example.

    The error is returned unchanged if there is nothing to add.
    """
    if error.missing_key:
        return _with_an_example(recipe, error, fields)
    key, place = error.unknown_key, error.path
    if not key:
        return error
    section = section_at(place, fields)
    own = section.get("kind") if isinstance(section, Mapping) else None
    meant = synonyms().get(f"{own}.{key}", [])
    kinds = [kind for kind, one in configs_at(recipe, place).items() if key in one.model_fields]
    if kinds and not meant:
        reason = f"unknown key {key!r}, which belongs to kind: {' or '.join(sorted(kinds))}"
        return ConfigError(f"{reason}; choose that kind, or remove {key}", place)
    places = [
        full
        for name in meant or synonyms().get(key, ())
        for full in _places_of_synonym(recipe, name, fields)
    ]
    places = places or places_of(recipe, key, fields)
    if not places and "did you mean" not in error.reason:
        places = [full for name in _near(recipe, key) for full in places_of(recipe, name, fields)]
    inside = [full for full in places if place and full.startswith(f"{place}.")]
    if not places:
        return error
    return ConfigError(f"unknown key {key!r}; did you mean {listed(inside or places)}?", place)


def _with_an_example(recipe: type[Config], error: ConfigError, fields: Any) -> ConfigError:
    """Add an example from the reference to an error about a missing key."""
    key, place = error.missing_key, error.path
    section = section_at(place, fields)
    kind = section.get("kind") if isinstance(section, Mapping) else None
    configs = configs_at(recipe, place)
    possible = [configs[kind]] if kind in configs else list(configs.values())
    for text in (text for config in possible for text in examples().get(config.__name__, ())):
        if key in (example := parse_yaml(text)):
            written = yaml.safe_dump({key: example[key]}, default_flow_style=True, sort_keys=False)
            where = f"{place}.{key}".lstrip(".")
            return ConfigError(
                f"{key!r} is missing; set one such as {' '.join(written.split())[1:-1]} "
                f"(see workhorse recipe {where})",
                place,
            )
    return error


def section_at(place: str, fields: Any) -> Any:
    """Return the value of a dotted key of a recipe; None if the recipe does not have the key."""
    for part in place.split(".") if place else ():
        fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def places_of(recipe: type[Config], key: str, fields: Any = None) -> list[str]:
    """Find the dotted keys of a recipe whose last part is `key`, or has the initials `key`.

    For example, `wd` finds `train.optimizer.weight_decay`. Keys with the fewest dots come first.

    Args:
        recipe: the class `Recipe`.
        key: a name or initials, without a dot.
        fields: the fields of the recipe. Names that the recipe chooses, such as those of its
            blocks, replace `NAME` in the keys.
    """
    last = {full: full.rpartition(".")[2] for full in all_keys(recipe)}
    found = [full for full, name in last.items() if name == key]
    found = found or [full for full, name in last.items() if _initials(name) == key]
    named = [one for full in found for one in _named(full.split("."), fields)]
    return sorted(dict.fromkeys(named), key=lambda full: (full.count("."), full))


def _places_of_synonym(recipe: type[Config], name: str, fields: Any) -> Iterable[str]:
    """Find the dotted keys of a name in `synonyms`, which may be a dotted key itself."""
    known = name in all_keys(recipe)
    return _named(name.split("."), fields) if known else places_of(recipe, name, fields)


def listed(places: list[str]) -> str:
    """Join dotted keys to a phrase such as `a, b, c or one of 2 more`."""
    shown = places[:LISTED]
    more = len(places) - len(shown)
    if more:
        return f"{', '.join(shown)} or one of {more} more"
    return " or ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def _initials(name: str) -> str:
    """Return the initials, such as `lr` for `learning_rate`; empty for a single word."""
    words = name.split("_")
    return "".join(word[0] for word in words if word) if len(words) > 1 else ""


def _near(recipe: type[Config], key: str) -> list[str]:
    names = {full.rpartition(".")[2] for full in all_keys(recipe)}
    return difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.8)


def _named(parts: list[str], fields: Any) -> Iterator[str]:
    """Yield a dotted key once for each name that the recipe uses in place of `NAME`."""
    if NAME not in parts:
        yield ".".join(parts)
        return
    at = parts.index(NAME)
    inside = section_at(".".join(parts[:at]), fields)
    names = list(inside) if isinstance(inside, Mapping) else []
    for name in names or [NAME]:
        yield ".".join([*parts[:at], str(name), *parts[at + 1 :]])
