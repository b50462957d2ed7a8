"""The base of every config: frozen, strict about keys, readable from YAML and JSON.

A set of alternatives is a tagged union: each alternative is a `Config` with a literal `kind`, and
the union is written `Annotated[A | B, Field(discriminator="kind")]`.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from workhorse import untrusted
from workhorse.errors import WorkhorseError
from workhorse.untrusted import shown, to_path

LARGEST = 2**63 - 1
"""Of a whole number; no size, count or seed is larger."""
MAX_BYTES = 1_000_000
"""Of a file in YAML."""


class ConfigError(WorkhorseError):
    """A config that cannot be: where (`path`, dotted) and why (`reason`).

    `unknown_key` is the key that the config at `path` has not, where that is the reason.
    """

    def __init__(self, reason: str, path: str = "", unknown_key: str = "") -> None:
        self.reason = reason
        self.path = path
        self.unknown_key = unknown_key
        super().__init__(f"{path}: {reason}" if path else reason)

    def below(self, path: str) -> "ConfigError":
        """The same of a config that stands at `path` of another."""
        whole = ".".join(part for part in (path, self.path) if part)
        return ConfigError(self.reason, whole, self.unknown_key)


class Config(BaseModel):
    """One frozen config.

    Raises:
        ConfigError: on an unknown key (naming the nearest), a wrong type, or a broken rule.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What may be looked for here and stands elsewhere, `key` or `key=kind`, and where that is."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _first_problem(type(self), error, fields) from None

    @model_validator(mode="before")
    @classmethod
    def _read_as_meant(cls, fields: Any) -> Any:
        """What pydantic would misread: `n_layers: true` as 1, and `position: rope` not at all."""
        if not isinstance(fields, dict):
            return fields
        given = cast(dict[str, Any], fields)
        for name, value in given.items():
            if name in cls.model_fields:
                annotation = cls.model_fields[name].annotation
                if isinstance(value, bool) and not {bool, Any, object} & set(
                    _alternatives(annotation)
                ):
                    raise ConfigError(f"{value} is true or false; give another value", name)
                if isinstance(value, str) and "\0" in value and Path in _alternatives(annotation):
                    raise ConfigError(f"{value!r} cannot name a file", name)
                _check_numbers(value, name)
        return {
            name: _with_kind(cls.model_fields[name].annotation, value)
            if name in cls.model_fields
            else value
            for name, value in given.items()
        }

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Build from plain data, as `to_dict` gives it."""
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected a mapping of settings, got {shown(fields)}")
        settings = cast(Mapping[Any, Any], fields)
        return cls(**{str(key): value for key, value in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data (numbers, strings, lists, dicts) holding every field."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        _check_text(text, "JSON")
        try:
            data = untrusted.parse_json(text.encode("utf-8", "surrogatepass"), "the text")
        except WorkhorseError as error:
            raise ConfigError(str(error)) from None
        return cls.from_dict(data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        data = parse_yaml(text)
        if isinstance(data, str):
            raise ConfigError(f"{shown(data)} is no settings; if it is a file, read_yaml reads it")
        return cls.from_dict(data)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as if written so from the start."""
        return type(self)(
            **{**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        )


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML text.

    Raises:
        ConfigError: the text is not YAML or not plain data, with line and column.
    """
    _check_text(text, "YAML")
    try:
        return untrusted.parse_yaml(text)
    except untrusted.BadYaml as error:
        raise ConfigError(str(error)) from None


def _check_text(text: object, language: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{language} is a text, not {shown(text)}; from_dict takes plain data")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        data = parse_yaml(
            untrusted.read_text(to_path(path, "a YAML file is a path"), limit=MAX_BYTES)
        )
        check_colons(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except WorkhorseError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {shown(data)}")
    return cast(dict[str, Any], data)


def check_colons(value: Any, path: str = "") -> None:
    """Refuse `{kind:rope}`, in which YAML reads a key `kind:rope` without a value."""
    if isinstance(value, list):
        for item in cast(list[Any], value):
            check_colons(item, path)
    elif isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            name, colon, rest = str(key).partition(":")
            if colon and item is None:
                raise ConfigError(
                    f"YAML reads {shown(str(key))} as one key without a value; write a space after "
                    f"the colon: {shown(f'{name}: {rest}')}",
                    path,
                )
            check_colons(item, f"{path}.{key}".lstrip("."))


LISTED_NAMES = 24
"""How many known names an error lists at most."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or which there are."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return f"known: {', '.join(names[:LISTED_NAMES]) or 'none'}{more}"


def _first_problem(
    config: type[Config], error: ValidationError, fields: Mapping[str, Any]
) -> ConfigError:
    """The first of pydantic's findings, unknown keys before others, as one line."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"]]
    value = problem["input"]
    context = problem.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):  # a config inside this one, or a rule of this one
        return cause.below(".".join(_without_tag(config, path)))
    unknown_key = ""
    match problem["type"]:
        case "extra_forbidden":
            *path, unknown_key = path
            remedy = config.elsewhere.get(unknown_key) or nearest(unknown_key, config.model_fields)
            reason = f"unknown key {shown(unknown_key)}; {remedy}"
        case "missing":
            *path, key = path
            reason = f"{key!r} is missing; give it a value"
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", context["expected_tags"])
            reason = _unknown_kind(config, path, context["tag"], tags)
        case "union_tag_not_found":
            near = difflib.get_close_matches(path[-1], _beside(fields, path), n=1, cutoff=0.6)
            remedy = f"did you mean {near[0]!r}?" if near else "give it one"
            reason = f"{shown(value)} has no 'kind'; {remedy}"
        case "value_error":
            reason = str(cause)
        case kind if kind in _WRONG_TYPES:
            reason = _wrong_type(kind, value, config, path)
        case _:
            messages = [problem["msg"]]
            if _is_plain_union(config, path):  # one finding for each arm, whose name is last
                path = path[:1]
                found = [other["msg"] for other in problems if str(other["loc"][0]) == path[0]]
                messages += [message.removeprefix("Input should be ") for message in found[1:]]
            message = ", or ".join(messages)
            reason = f"{shown(value)} is not allowed: {message[0].lower()}{message[1:]}"
    return ConfigError(reason, ".".join(_without_tag(config, path)), unknown_key)


def _beside(fields: Mapping[str, Any], path: list[str]) -> list[str]:
    """The other names in the mapping of names that a path leads into; none elsewhere."""
    if len(path) != 2 or not isinstance(named := fields.get(path[0]), dict):  # noqa: PLR2004
        return []
    return [str(name) for name in cast(dict[Any, Any], named) if str(name) != path[1]]


_WRONG_TYPES = {"tuple_type", "list_type", "path_type"} | {
    "dict_type",
    "model_type",
    "model_attributes_type",
}


def _unknown_kind(config: type[Config], path: list[str], kind: str, known: Iterable[str]) -> str:
    remedy = config.elsewhere.get(f"{'.'.join(path)}={kind}") or nearest(kind, known)
    return f"unknown kind {shown(kind)}; {remedy}"


def _wrong_type(problem: str, value: Any, config: type[Config], path: list[str]) -> str:
    """Why a value that is no list, no path or no settings cannot stand where one is expected."""
    if problem in ("tuple_type", "list_type"):
        what = f"is one text; write [{shown(value)}]" if isinstance(value, str) else "is none"
        return f"a list is needed, and {shown(value)} {what}"
    if problem == "path_type":
        return f"{shown(value)} is not a path; give the name of a file or folder"
    if isinstance(value, str) and (kinds := _kinds(_annotation_at(config, path))):
        return _unknown_kind(config, path, value, kinds)
    return f"{shown(value)} is not settings; write them as key: value, or {{key: value}}"


def _annotation_at(config: type[Config], path: list[str]) -> Any:
    """What may stand in a field of a config, or under a key of such a field."""
    field = config.model_fields.get(path[0]) if path else None
    return field.annotation if field else None


def _check_numbers(value: Any, name: str) -> None:
    """Refuse a whole number that no size, count or seed can be, however deep it lies."""
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError("a whole number is 2^63 - 1 at most; choose a smaller one", name)
    if isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            _check_numbers(key, name)
            _check_numbers(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for item in cast(list[Any], value):
            _check_numbers(item, name)


def _with_kind(annotation: Any, value: Any) -> Any:
    """A plain word spelled out where a config of that kind may stand: `rope`, `{kind: rope}`."""
    if isinstance(value, str):
        return {"kind": value} if value in _kinds(annotation) else value
    if get_origin(annotation) is dict and isinstance(value, dict):
        inside = get_args(annotation)[1]
        items = cast(dict[Any, Any], value).items()
        return {key: _with_kind(inside, item) for key, item in items}
    return value


def _kinds(annotation: Any) -> set[str]:
    """The kinds of config that a field may hold; none where it may be a text as well."""
    kinds = [config.model_fields.get("kind") for config in configs_in(annotation)]
    plain = str in _alternatives(annotation)
    return set() if plain else {kind.default for kind in kinds if kind}


def _alternatives(annotation: Any) -> list[Any]:
    """The types a field may have: `int | None` gives int and None."""
    inside = get_args(annotation)
    return [kind for part in inside for kind in _alternatives(part)] if inside else [annotation]


def _is_plain_union(config: type[Config], path: list[str]) -> bool:
    """Whether a path leads into a field of several plain types, as a number or a word."""
    field = config.model_fields.get(path[0]) if path[1:] else None
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    arms = [arm for arm in get_args(field.annotation) if arm is not NoneType]
    return len(arms) > 1 and not configs_in(field.annotation)


def _without_tag(config: type[Config], path: list[str]) -> list[str]:
    """Drop the union tag that pydantic may put last, so that the path reads as in the file.

    It stands after the field's name, or after the key or index within that field.
    """
    annotation = (
        config.model_fields[path[0]].annotation if path and path[0] in config.model_fields else None
    )
    depth = 2 if get_origin(annotation) in (dict, list, tuple) else 1
    kinds = [arm.model_fields.get("kind") for arm in configs_in(annotation)]
    tagged = len(path) == depth + 1 and path[-1] in {kind.default for kind in kinds if kind}
    return path[:-1] if tagged else path


def configs_in(annotation: Any) -> list[type[Config]]:
    """The configs that a field of that type may hold, inside lists and mappings too."""
    kinds = _alternatives(annotation)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]
