"""The base of every config: frozen, strict about keys, readable from YAML and JSON.

A set of alternatives is a tagged union: each alternative is a `Config` with a literal `kind`, and
the union is written `Annotated[A | B, Field(discriminator="kind")]`.
"""

import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

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

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Build from plain data, as `to_dict` gives it."""
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected a mapping of settings, got {_show(fields)}")
        return cls(**{str(key): value for key, value in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data (numbers, strings, lists, dicts) holding every field."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))

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
    """PyYAML reads `3e-4` as a string and `on` as true (YAML 1.1); YAML 1.2 does not."""


_Yaml12Loader.yaml_implicit_resolvers = {
    first: [
        (tag, rule)
        for tag, rule in rules
        if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
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
        raise ConfigError(f"not valid YAML{where}: {getattr(error, 'problem', error)}") from None


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
    return data


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
        target: Any = result
        for depth, section in enumerate(sections):
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(f"{where} holds {_show(target)}, not settings; check {setting!r}")
        target[key] = parse_yaml(value)
    return result


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return (
        f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(names)) or 'none'}"
    )


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
        return ConfigError(cause.reason, ".".join(_without_tags(config, path) + inner))
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
            message = problem["msg"]
            reason = f"{_show(value)} is not allowed: {message[0].lower()}{message[1:]}"
    return ConfigError(reason, ".".join(_without_tags(config, path)))


def _without_tags(config: type[Config], path: list[str]) -> list[str]:
    """Drop the union tags that pydantic puts into a path, so that the path reads as in the file."""
    if not path or path[0] not in config.model_fields:
        return path
    field = config.model_fields[path[0]]
    tags = {
        arm.model_fields["kind"].default
        for arm in _configs_in(field.annotation)
        if "kind" in arm.model_fields
    }
    return [path[0], *(part for part in path[1:] if part not in tags)]


def _configs_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Config) else []
    return [config for part in get_args(annotation) for config in _configs_in(part)]


def _show(value: Any) -> str:
    return textwrap.shorten(repr(value), 60, placeholder=" ...")
