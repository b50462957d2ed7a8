"""The base of every config: frozen, strict about keys, readable from YAML and JSON.

A set of alternatives is a tagged union: each alternative is a `Config` with a literal `kind`, and
the union is written `Annotated[A | B, Field(discriminator="kind")]`.
"""

import difflib
import json
import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from workhorse.errors import WorkhorseError


class ConfigError(WorkhorseError):
    """A config that cannot be: where (`path`, dotted) and why (`reason`)."""

    def __init__(self, reason: str, path: str = "") -> None:
        self.reason = reason
        self.path = path
        super().__init__(f"{path}: {reason}" if path else reason)


class Config(BaseModel):
    """One frozen config.

    Raises:
        ConfigError: on an unknown key (naming the nearest), a wrong type, or a broken rule.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _first_problem(type(self), error) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_numbers(cls, fields: Any) -> Any:
        """Pydantic would read `n_layers: true` as 1."""
        given = cast(dict[str, Any], fields) if isinstance(fields, dict) else {}
        for name, value in given.items():
            if isinstance(value, bool) and name in cls.model_fields:
                annotation = cls.model_fields[name].annotation
                if not {bool, Any, object} & set(_alternatives(annotation)):
                    raise ConfigError(f"{value} is true or false; give another value", name)
        return cast(Any, fields)

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Build from plain data, as `to_dict` gives it."""
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected a mapping of settings, got {_show(fields)}")
        settings = cast(Mapping[Any, Any], fields)
        return cls(**{str(key): value for key, value in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data (numbers, strings, lists, dicts) holding every field."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise ConfigError(f"not valid JSON at {where}: {error.msg}") from None
        return cls.from_dict(data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        return cls.from_dict(parse_yaml(text))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as if written so from the start."""
        return type(self)(
            **{**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        )


class _Yaml12Loader(yaml.SafeLoader):
    """PyYAML reads `3e-4` as a string and `on` as true (YAML 1.1); YAML 1.2 does not.

    A key given twice is an error here, not the last one's win.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            construct = cast(Callable[..., Any], self.construct_object)
            key = construct(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.MarkedYAMLError(
                    problem="a key must be a plain word or number", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice; keep one",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_YAML_1_2 = {
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9]\d*)$", "-+0123456789"),
    "float": (
        r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
}
"""How plain scalars of each type are written, and the characters they begin with. Dates, numbers to
base 60 and the like stay text."""

_Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] in ("null", "merge")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_rule, _first) in _YAML_1_2.items():
    _Yaml12Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"tag:yaml.org,2002:{_kind}", re.compile(_rule), list(_first)
    )


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML text.

    Raises:
        ConfigError: the text is not YAML, with line and column.
    """
    try:
        return yaml.load(text, Loader=_Yaml12Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise ConfigError(f"not valid YAML{where}: {problem}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: bad byte at offset {error.start}") from None
    try:
        data = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.reason}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {_show(data)}")
    return cast(dict[str, Any], data)


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Plain data with `section.key=value` settings written into it; values are read as YAML.

    Raises:
        ConfigError: a setting without `=`, or a path through something that is not a mapping.
    """
    result = json.loads(json.dumps(data))
    for setting in overrides:
        path, equals, value = setting.partition("=")
        if not equals or not path:
            raise ConfigError(f"{setting!r} is not a setting; write section.key=value")
        *sections, key = path.split(".")
        target: dict[str, Any] = result
        for depth, section in enumerate(sections):
            inside: Any = target.get(section)
            if inside is None:
                inside = target[section] = {}
            if not isinstance(inside, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(f"{where} holds {_show(inside)}, not settings; check {setting!r}")
            target = cast(dict[str, Any], inside)
        target[key] = parse_yaml(value)
    return result


LISTED_NAMES = 24
"""How many known names an error lists at most."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or which there are."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return f"known: {', '.join(names[:LISTED_NAMES]) or 'none'}{more}"


def _first_problem(config: type[Config], error: ValidationError) -> ConfigError:
    """The first of pydantic's findings, unknown keys before others, as one line."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"]]
    value = problem["input"]
    context = problem.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):  # a config inside this one, or a rule of this one
        inner = [cause.path] if cause.path else []
        return ConfigError(cause.reason, ".".join(_without_tag(config, path) + inner))
    match problem["type"]:
        case "extra_forbidden":
            *path, key = path
            reason = f"unknown key {key!r}; {nearest(key, config.model_fields)}"
        case "missing":
            *path, key = path
            reason = f"{key!r} is missing; give it a value"
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", context["expected_tags"])
            reason = f"unknown kind {context['tag']!r}; {nearest(context['tag'], tags)}"
        case "union_tag_not_found":
            reason = f"{_show(value)} has no 'kind'; give it one"
        case "value_error":
            reason = str(cause)
        case _:
            messages = [problem["msg"]]
            if _is_plain_union(config, path):  # one finding for each arm, whose name is last
                path = path[:1]
                found = [other["msg"] for other in problems if str(other["loc"][0]) == path[0]]
                messages += [message.removeprefix("Input should be ") for message in found[1:]]
            message = ", or ".join(messages)
            reason = f"{_show(value)} is not allowed: {message[0].lower()}{message[1:]}"
    return ConfigError(reason, ".".join(_without_tag(config, path)))


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


def _show(value: Any) -> str:
    return textwrap.shorten(repr(value), 60, placeholder=" ...")
