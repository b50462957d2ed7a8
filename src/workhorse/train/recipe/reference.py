"""What a recipe may say, told by its configs: `workhorse recipe`, and the page docs/recipe.md.

A section is what stands at one place of a recipe, `train.schedule` for one. Where a `kind` chooses
among several configs, keys that all of them share are told once. The examples are a file beside
this one; the tests build each of them.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml
from pydantic.fields import FieldInfo

from workhorse.config import Config, configs_in, nearest, parse_yaml
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.on_resume import OnResume, marked
from workhorse.train.recipe.recipe import Recipe

NAME = "NAME"
"""In a place, stands for a name of the writer's choice, such as a block's."""
EXAMPLES = "examples.yaml"
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {
    "boolean": "true or false",
    "integer": "whole number",
    "object": "mapping",
    "string": "text",
}
"""What JSON schema calls otherwise; `path`, `number` and `null` are the same."""
ROUND_TO_POWERS = 10**9


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    type: str
    """What it may hold, in words; `@PLACE` refers to a section."""
    default: str | None
    """As it is written in YAML; None: the key must be given."""
    meaning: str
    on_resume: str
    """What a resumed run does with another value."""

    @property
    def needs_new_run(self) -> bool:
        """Whether a resumed run refuses another value, as most keys' it does."""
        return self.on_resume == OnResume.NEW_RUN.value


@dataclass(frozen=True)
class Kind:
    """One config that may stand at a place."""

    name: str
    """Its `kind`; empty where there is one config only."""
    summary: str
    keys: tuple[Key, ...]
    """Those that not all kinds of the section have."""
    examples: tuple[str, ...]
    """In YAML; together they hold every key."""
    places: tuple[str, ...]
    """Dotted; empty is the whole recipe."""


@dataclass(frozen=True)
class Section:
    """What stands at one place of a recipe, or at several alike."""

    title: str
    """The first of its places."""
    shared: tuple[Key, ...]
    """The keys of every kind."""
    kinds: tuple[Kind, ...]

    @property
    def other_places(self) -> dict[str, list[str]]:
        """The kinds that may stand at each of the places but the first."""
        places: dict[str, list[str]] = {}
        for kind in self.kinds:
            for place in kind.places[1:]:
                places.setdefault(place, []).append(kind.name)
        return places

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Group(NamedTuple):
    """The configs of a section."""

    title: str
    configs: tuple[type[Config], ...]
    rule: OnResume
    """For keys without a mark of their own."""


@cache
def sections() -> tuple[Section, ...]:
    """All sections, in the order of a recipe."""
    return tuple(_section(group) for group in recipe_configs()[0])


def sections_at(key: str) -> list[Section]:
    """What may stand at a dotted key: whole sections, or else the key alone.

    Raises:
        WorkhorseError: there is no such key, with the nearest one.
    """
    if found := [part for section in sections() if (part := _standing_at(section, key))]:
        return found
    above, _, name = key.rpartition(".")
    parts = [part for section in sections() if (part := _standing_at(section, above))]
    if found := [only for part in parts if (only := _with_key(part, name))]:
        return found
    raise WorkhorseError(f"a recipe has no key {key!r}; {nearest(key, all_keys())}")


@cache
def recipe_configs() -> tuple[list[Group], dict[type[Config], list[str]]]:
    """Every config that a recipe may hold: the groups, and the places of each."""
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

    visit((Recipe,), "", OnResume.NEW_RUN)
    visit((DecoderConfig,), "model", OnResume.NEW_RUN)
    return groups, places


def configs_at(place: str) -> dict[str, type[Config]]:
    """The configs that may stand at a dotted place, by kind."""
    return {
        _kind(config): config
        for config, places in recipe_configs()[1].items()
        if any(_matches(known, place) for known in places)
    }


def names_at(place: str) -> bool:
    """Whether a dotted place holds a mapping of names of the writer's choice."""
    return bool(configs_at(f"{place}.{NAME}"))


@cache
def examples() -> dict[str, tuple[str, ...]]:
    """The examples of each config, by the name of its class."""
    text = resources.files("workhorse.train.recipe").joinpath(EXAMPLES).read_text("utf-8")
    return {name: tuple(listed) for name, listed in parse_yaml(text).items()}


def _section(group: Group) -> Section:
    places = recipe_configs()[1]
    keys = {config: _keys(config, group.rule) for config in group.configs}
    first, *others = keys.values()
    shared = [key for key in first if others and all(key in other for other in others)]
    kinds = (
        Kind(
            _kind(config),
            (inspect.getdoc(config) or "").partition("\n\nRaises:")[0].strip(),
            tuple(key for key in keys[config] if key not in shared),
            examples().get(config.__name__, ()),
            tuple(places[config]),
        )
        for config in group.configs
    )
    return Section(group.title, tuple(shared), tuple(kinds))


def _kind(config: type[Config]) -> str:
    return str(config.model_fields["kind"].default) if "kind" in config.model_fields else ""


def _keys(config: type[Config], rule: OnResume) -> list[Key]:
    return [
        Key(
            name,
            "@model" if (config, name) == (Recipe, "model") else _type(part),
            _default(config.model_fields[name]),
            " ".join(part.get("description", "").split()),
            (marked(config.model_fields[name].metadata) or rule).value,
        )
        for name, part in config.model_json_schema()["properties"].items()
        if name != "kind"
    ]


def _type(schema: Mapping[str, Any]) -> str:
    """A part of a JSON schema in words."""
    arms = _arms(schema)
    words = [_plain_type(arm) for arm in arms if "$ref" not in arm]
    return " or ".join([*_references(arm["$ref"] for arm in arms if "$ref" in arm), *words])


def _arms(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a union, whatever it is made of."""
    inside = schema.get("anyOf") or schema.get("oneOf")
    return [schema] if inside is None else [arm for part in inside for arm in _arms(part)]


def _references(found: Iterable[str]) -> Iterator[str]:
    """The sections of configs, with their kinds where not all of a section's may stand there."""
    names = {name.rpartition("/")[2] for name in found}
    for title, configs, _ in recipe_configs()[0]:
        fitting = [f"`{_kind(config)}`" for config in configs if config.__name__ in names]
        if len(fitting) == len(configs):
            yield f"@{title}"
        elif fitting:
            yield f"{', '.join(fitting)} of @{title}"


def _plain_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    limits = " and ".join(
        f"{sign} {_number(schema[key])}" for key, sign in BOUNDS.items() if key in schema
    )
    kind, form = schema.get("type", "object"), schema.get("format")
    if kind == "array":
        return f"list of: {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"names, and for each: {_type(schema['additionalProperties'])}"
    return f"{WORDS.get(form or kind, kind)} {limits}".rstrip()


def _number(value: float) -> str:
    exponent = int(value).bit_length() - 1
    if value >= ROUND_TO_POWERS and value == 2**exponent:
        return f"2^{exponent}"
    return f"{value:,}".removesuffix(".0")


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Config):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        kind = _kind(type(value))
        value = {"kind": kind, **changed} if kind else changed
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _standing_at(section: Section, key: str) -> Section | None:
    """The section with the kinds that may stand at that place; None where none may."""
    kinds = tuple(
        kind for kind in section.kinds if any(_matches(place, key) for place in kind.places)
    )
    return replace(section, kinds=kinds) if kinds else None


def _with_key(section: Section, name: str) -> Section | None:
    """The section with one key alone; None where no kind has it."""
    shared = tuple(key for key in section.shared if key.name == name)
    kinds = tuple(
        replace(kind, keys=keys, examples=())
        for kind in section.kinds
        if (keys := tuple(key for key in kind.keys if key.name == name))
    )
    return replace(section, shared=shared, kinds=kinds) if shared or kinds else None


def _matches(place: str, key: str) -> bool:
    """Whether a dotted key names that place, any name standing for NAME."""
    parts, given = place.split("."), key.split(".")
    return len(parts) == len(given) and all(
        part in (NAME, word) for part, word in zip(parts, given, strict=True)
    )


@cache
def all_keys() -> set[str]:
    """Every dotted key of a recipe, with `NAME` for names of the writer's choice."""
    return {
        f"{place}.{key.name}".lstrip(".")
        for section in sections()
        for kind in section.kinds
        for place in kind.places
        for key in (*section.shared, *kind.keys)
    }
