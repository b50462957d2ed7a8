"""The base class of all configs: immutable, without unknown keys, readable from YAML and JSON.

If a field accepts one of several configs, it is a tagged union: each alternative is a `Config` with
a literal `kind`, and the annotation is `Annotated[A | B, Field(discriminator="kind")]`.

A mark in the annotation declares whether a resumed run may change the field:

    learning_rate: Annotated[float, OnResume.CONTINUES] = 1e-3

The mark applies to the field and all fields nested in it, unless a nested field has its own mark.
Without a mark, a changed value needs a new run (`OnResume.NEW_RUN`). If the `kind` of a nested
config changes, the mark of `kind` (if any) applies to the whole config. If a setting on the command
line changes the `kind`, the values of fields marked `OfItsKind` are dropped.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from workhorse.config.errors import (
    LARGEST,
    ConfigError,
    alternatives,
    first_problem,
    kinds_in,
    wrong_value,
)
from workhorse.errors import WorkhorseError, shown
from workhorse.files import text_formats
from workhorse.files.text_formats import parse_json, read_text, to_path

__all__ = [
    "Config",
    "ConfigError",
    "check_colons",
    "configs_in",
    "parse_yaml",
    "read_yaml",
]

MAX_BYTES = 1_000_000
"""Maximum size of a YAML file in bytes."""


class Config(BaseModel):
    """Base class of all configs, which are immutable.

    Raises:
        ConfigError: a key is unknown (the message suggests the most similar one), or a value has a
            wrong type or is not allowed.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Hints for keys that users often write in this config by mistake.

    Maps an unknown `KEY`, or `KEY=KIND` for an unknown kind, to the end of the error message.
    """

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise first_problem(type(self), error, fields) from None

    @model_validator(mode="before")
    @classmethod
    def _read_as_meant(cls, fields: Any) -> Any:
        """Check and expand values before pydantic reads them.

        For example, `n_layers: true` raises an error, because pydantic would read it as 1, and
        `position: rope` is expanded to `position: {kind: rope}`.
        """
        if not isinstance(fields, dict):
            return fields
        given = cast(dict[str, Any], fields)
        for name, value in given.items():
            if name in cls.model_fields:
                field = cls.model_fields[name]
                annotation = field.annotation
                if isinstance(value, bool) and not {bool, Any, object} & set(
                    alternatives(annotation)
                ):
                    raise ConfigError(wrong_value(value, annotation, field.metadata), name)
                if isinstance(value, str) and "\0" in value and Path in alternatives(annotation):
                    raise ConfigError(
                        f"{value!r} is not a valid file name; remove the null character", name
                    )
                _check_numbers(value, name)
        return {
            name: _with_kind(cls.model_fields[name].annotation, value)
            if name in cls.model_fields
            else value
            for name, value in given.items()
        }

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        """Build a config from plain data as returned by `to_dict`."""
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected settings, each as `key: value`, got {shown(fields)}")
        settings = cast(Mapping[Any, Any], fields)
        return cls(**{str(key): value for key, value in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data (numbers, strings, lists, dicts)."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        _check_text(text, "JSON")
        try:
            data = parse_json(text.encode("utf-8", "surrogatepass"), "the text")
        except WorkhorseError as error:
            raise ConfigError(str(error)) from None
        return cls.from_dict(data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        data = parse_yaml(text)
        if isinstance(data, str):
            raise ConfigError(
                f"expected settings, got {shown(data)}; to read a file, use read_yaml"
            )
        return cls.from_dict(data)

    def to_yaml(self) -> str:
        return text_formats.write_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new config."""
        return type(self)(
            **{**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        )


def parse_yaml(text: str) -> Any:
    """Parse a YAML string into plain data (numbers, strings, lists, dicts).

    Raises:
        ConfigError: the string is not YAML or not plain data. The message contains line and column.
    """
    _check_text(text, "YAML")
    try:
        return text_formats.parse_yaml(text)
    except text_formats.BadYaml as error:
        raise ConfigError(str(error)) from None


def _check_text(text: object, language: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(
            f"{language} must be a string, not {shown(text)}; for a dict, use from_dict"
        )


KINDS = {
    "train": ("recipe", "train"),
    "budget": ("study", "compare"),
    "models": ("merge recipe", "merge"),
}
"""Kinds of YAML files and the verbs that read them, by a key that only files of the kind have."""


def read_yaml(path: str | Path, kind: str = "") -> dict[str, Any]:
    """Read a YAML file that contains a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, not a mapping, or is not of the
            given kind (see `KINDS`).
    """
    if kind and Path(path).is_dir():
        raise ConfigError(f"{path} is a folder, not a {kind}; give the YAML file of a {kind}")
    try:
        data = parse_yaml(read_text(to_path(path, "a YAML file is a path"), limit=MAX_BYTES))
        check_colons(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except WorkhorseError as error:
        raise ConfigError(str(error)) from None
    if data is None:
        raise ConfigError(f"{path} is empty; write settings, each as `key: value`")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected settings, each as `key: value`, got {shown(data)}")
    for key, (found, verb) in KINDS.items():
        if kind and key in data and found != kind:
            raise ConfigError(f"{path} is a {found}, not a {kind}; run workhorse {verb} {path}")
    return cast(dict[str, Any], data)


def check_colons(value: Any, path: str = "") -> None:
    """Raise an error for a missing space after a colon in parsed YAML, at any depth.

    YAML parses `{kind:rope}` as a key `kind:rope` without a value. `path` is the dotted path of
    `value`, for the error.
    """
    if isinstance(value, list):
        for item in cast(list[Any], value):
            check_colons(item, path)
    elif isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            name, colon, rest = str(key).partition(":")
            if colon and item is None:
                raise ConfigError(
                    f"YAML parses {shown(str(key))} as one key without a value; add a space after "
                    f"the colon: {shown(f'{name}: {rest}')}",
                    path,
                )
            check_colons(item, f"{path}.{key}".lstrip("."))


def _check_numbers(value: Any, name: str) -> None:
    """Raise an error if a value contains an integer that is larger than `LARGEST` in magnitude.

    Nested values are checked too. `name` is the value's dotted path, for the error.
    """
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError("a whole number is larger than 2^63 - 1; choose a smaller one", name)
    if isinstance(value, dict):
        for key, item in cast(dict[Any, Any], value).items():
            _check_numbers(key, name)
            _check_numbers(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for item in cast(list[Any], value):
            _check_numbers(item, name)


def _with_kind(annotation: Any, value: Any) -> Any:
    """Expand a string to a config if the field accepts a kind of that name.

    `rope` becomes `{kind: rope}`. Other values are returned unchanged.
    """
    if isinstance(value, str):
        return {"kind": value} if value in kinds_in(annotation) else value
    if get_origin(annotation) is dict and isinstance(value, dict):
        inside = get_args(annotation)[1]
        items = cast(dict[Any, Any], value).items()
        return {key: _with_kind(inside, item) for key, item in items}
    return value


def configs_in(annotation: Any) -> list[type[Config]]:
    """Return the config classes in a field's annotation, also inside unions, lists and mappings."""
    kinds = alternatives(annotation)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]


class OnResume(Enum):
    """Rules for changing a setting when a run is resumed.

    Each value is the rule as docs/recipe.md prints it.
    """

    NO_EFFECT = "may change; the training stays the same"
    ROUNDED = "may change; results are then rounded differently"
    CONTINUES = "may change; training continues with the new value"
    SAME_DATA = "may change if the tokens stay the same"
    NEW_RUN = "needs a new run"


@dataclass(frozen=True)
class OfItsKind:
    """Mark of a field that has the same name but another meaning in another `kind` of the config.

    When a setting on the command line changes the `kind`, the field's value is dropped.
    """


def rule_of(config: Config, path: Iterable[str]) -> OnResume:
    """Return the rule for changing a setting of a config when a run is resumed.

    Args:
        config: the config that contains the setting. Its values determine which alternative of a
            union is used.
        path: the names of nested fields, such as `("train", "steps")`. If the path leads into plain
            data, such as a list, the rule of the last field applies.
    """
    rule, here = OnResume.NEW_RUN, config
    for name in path:
        field = type(here).model_fields.get(name) if isinstance(here, Config) else None
        if field is None:
            break
        rule = marked(field.metadata) or rule
        here: Any = getattr(here, name)
    kind = type(here).model_fields.get("kind") if isinstance(here, Config) else None
    return (marked(kind.metadata) if kind else None) or rule


def marked(metadata: Iterable[Any]) -> OnResume | None:
    """Return the `OnResume` mark in a field's metadata (`CLASS.model_fields[NAME].metadata`)."""
    return next((mark for mark in metadata if isinstance(mark, OnResume)), None)
