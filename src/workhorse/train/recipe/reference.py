"""Reference of all recipe keys, for `workhorse recipe` and docs/recipe.md, made from the configs.

A section describes one mapping in a recipe, such as `train.schedule`. If `kind` selects one of
several configs there, their common keys are listed once. The dotted key of such a mapping is called
a place. The examples are in examples.yaml; the tests build each example.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from workhorse.config.base import Config, OnResume, marked
from workhorse.errors import WorkhorseError, nearest
from workhorse.train.recipe.keys import (
    Group,
    all_keys,
    examples,
    kind_of,
    matches,
    recipe_configs,
    synonyms,
)
from workhorse.train.recipe.recipe import Recipe

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {
    "boolean": "true or false",
    "integer": "whole number",
    "object": "mapping",
    "string": "text",
}
"""Names of JSON schema types in the reference; `path`, `number` and `null` are not renamed."""
ROUND_TO_POWERS = 10**9
NAMED = 5
"""Maximum number of dotted keys that an error lists."""


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    type: str
    """Accepted values, in words; `@train.schedule` refers to the section of that title."""
    default: str | None
    """Default in YAML; None: the key is required."""
    meaning: str
    on_resume: str
    """Effect of a changed value on a resumed run."""

    @property
    def needs_new_run(self) -> bool:
        """True if a changed value needs a new run, as for most keys."""
        return self.on_resume == OnResume.NEW_RUN.value


@dataclass(frozen=True)
class Alternative:
    """One of the configs that a section describes."""

    name: str
    """The config's `kind`; empty if there is only one config."""
    summary: str
    keys: tuple[Key, ...]
    """The keys that are not common to all kinds of the section."""
    examples: tuple[str, ...]
    """Examples in YAML; together they contain every key."""
    places: tuple[str, ...]
    """Dotted keys that accept the config; an empty key is the whole recipe."""


@dataclass(frozen=True)
class Section:
    """A section of the recipe reference: the configs that one or more dotted keys accept."""

    title: str
    """The first dotted key that accepts these configs."""
    shared: tuple[Key, ...]
    """The keys that every kind has."""
    kinds: tuple[Alternative, ...]

    @property
    def other_places(self) -> dict[str, list[str]]:
        """The other dotted keys that accept configs of this section, each with its kinds."""
        places: dict[str, list[str]] = {}
        for kind in self.kinds:
            for place in kind.places[1:]:
                places.setdefault(place, []).append(kind.name)
        return places

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of a recipe."""
    return tuple(_section(group) for group in recipe_configs(Recipe)[0])


def sections_at(key: str) -> list[Section]:
    """Return the reference of a dotted key: whole sections, or sections reduced to that key.

    Raises:
        WorkhorseError: the key does not exist; the message suggests a similar one.
    """
    if matching := [part for section in sections() if (part := _standing_at(section, key))]:
        return matching
    above, _, name = key.rpartition(".")
    parts = [part for section in sections() if (part := _standing_at(section, above))]
    if matching := [only for part in parts if (only := _with_key(part, name))]:
        return matching
    wanted = set(synonyms().get(key.lower(), [key]))
    if found := sorted(one for one in all_keys(Recipe) if wanted & {one, one.rpartition(".")[2]}):
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise WorkhorseError(
            f"a recipe has no top-level key {key!r}; see {', '.join(found[:NAMED])}{more}"
        )
    raise WorkhorseError(f"a recipe has no key {key!r}; {nearest(key, all_keys(Recipe))}")


def _section(group: Group) -> Section:
    places = recipe_configs(Recipe)[1]
    keys = {config: _keys(config, group.rule) for config in group.configs}
    first, *others = keys.values()
    shared = [key for key in first if others and all(key in other for other in others)]
    kinds = (
        Alternative(
            kind_of(config),
            (inspect.getdoc(config) or "").partition("\n\nRaises:")[0].strip(),
            tuple(key for key in keys[config] if key not in shared),
            examples().get(config.__name__, ()),
            tuple(places[config]),
        )
        for config in group.configs
    )
    return Section(group.title, tuple(shared), tuple(kinds))


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
    """Describe the type in a part of a JSON schema, in words."""
    arms = _arms(schema)
    words = [_plain_type(arm) for arm in arms if "$ref" not in arm]
    return " or ".join([*_references(arm["$ref"] for arm in arms if "$ref" in arm), *words])


def _arms(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a union; nested unions are flattened."""
    inside = schema.get("anyOf") or schema.get("oneOf")
    return [schema] if inside is None else [arm for part in inside for arm in _arms(part)]


def _references(found: Iterable[str]) -> Iterator[str]:
    """Yield references to sections. If only some kinds are accepted, a reference lists these."""
    names = {name.rpartition("/")[2] for name in found}
    for title, configs, _ in recipe_configs(Recipe)[0]:
        fitting = [f"`{kind_of(config)}`" for config in configs if config.__name__ in names]
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
        kind = kind_of(type(value))
        value = {"kind": kind, **changed} if kind else changed
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _standing_at(section: Section, key: str) -> Section | None:
    """Return the section with only the kinds that a dotted key accepts; None if there are none."""
    kinds = tuple(
        kind for kind in section.kinds if any(matches(place, key) for place in kind.places)
    )
    return replace(section, kinds=kinds) if kinds else None


def _with_key(section: Section, name: str) -> Section | None:
    """Return the section reduced to the key with this name; None if no kind has the key."""
    shared = tuple(key for key in section.shared if key.name == name)
    kinds = tuple(
        replace(kind, keys=keys, examples=())
        for kind in section.kinds
        if (keys := tuple(key for key in kind.keys if key.name == name))
    )
    return replace(section, shared=shared, kinds=kinds) if shared or kinds else None
