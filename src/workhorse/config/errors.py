"""One-line errors for invalid configs: what is wrong, with which value, and what to do.

pydantic detects the problem. The message is derived from the annotation of the field.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from workhorse.errors import WorkhorseError, meant, nearest, shown

if TYPE_CHECKING:
    from workhorse.config.base import Config

LARGEST = 2**63 - 1
"""Largest integer that a config accepts."""

_NOUNS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "the path of a file or folder",
}
_OTHERS = {bool: "true or false", NoneType: "null", Any: "another value", object: "another value"}
_FACTS = {
    "int": "is not a whole number",
    "float": "is not a number",
    "string": "is not a string",
    "path": "is not a path",
    "finite": "is not a finite number",
    "greater": "is too small",
    "less": "is too large",
}
"""Part of the message about a wrong value, by the first word of pydantic's error type."""
_NO_LIST = {"tuple_type", "list_type"}
_NO_SETTINGS = {"dict_type", "model_type", "model_attributes_type", "union_tag_not_found"}


class ConfigError(WorkhorseError):
    """An error in a config: the dotted `path` of the wrong setting, and the `reason`.

    `unknown_key` names a key that the config at `path` does not have. `missing_key` names a
    required key that is not given. Both are empty for other errors.
    """

    def __init__(
        self, reason: str, path: str = "", unknown_key: str = "", missing_key: str = ""
    ) -> None:
        self.reason = reason
        self.path = path
        self.unknown_key = unknown_key
        self.missing_key = missing_key
        super().__init__(f"{path}: {reason}" if path else reason)

    def below(self, path: str) -> "ConfigError":
        """Return a copy of the error for an outer config, which contains this config at `path`."""
        whole = ".".join(part for part in (path, self.path) if part)
        return ConfigError(self.reason, whole, self.unknown_key, self.missing_key)


def as_written(value: object) -> str:
    """Format a value for a message as a recipe writes it: `null` and `true`, not None and True."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)


def first_problem(
    config: "type[Config]", error: ValidationError, fields: Mapping[str, Any]
) -> ConfigError:
    """Convert the first of pydantic's errors to a `ConfigError`. Unknown keys come first.

    `fields` are the values from which a config of the class `config` should have been built.
    """
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"]]
    value = problem["input"]
    context = problem.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):  # raised by a nested config or by a validator
        return cause.below(".".join(_without_tag(config, path)))
    unknown_key = missing_key = ""
    match problem["type"]:
        case "extra_forbidden":
            *path, unknown_key = path
            remedy = config.elsewhere.get(unknown_key) or nearest(unknown_key, config.model_fields)
            reason = f"unknown key {shown(unknown_key)}; {remedy}"
        case "missing":
            reason = f"{path[-1]!r} is missing; give {_wanted(*_field_at(config, path)[:2])}"
            *path, missing_key = path
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", context["expected_tags"])
            reason = _unknown_kind(config, path, context["tag"], tags)
        case "union_tag_not_found" if isinstance(value, Mapping):
            remedy = meant(path[-1], _beside(fields, path)) or _kinds_known(config, path)
            reason = f"'kind' is missing; {remedy}"
        case "value_error":
            reason = str(cause)
        case kind if kind in _NO_LIST:
            what = f"a string; write [{shown(value)}]" if isinstance(value, str) else "not a list"
            reason = f"expected a list, and {as_written(value)} is {what}"
        case kind if kind in _NO_SETTINGS:
            reason = _no_settings(value, config, path)
        case kind:
            annotation, marks, depth = _field_at(config, path)
            reason = wrong_value(value, annotation, marks, kind)
            path = path[:depth]  # without the union's alternative, which pydantic appends
    return ConfigError(reason, ".".join(_without_tag(config, path)), unknown_key, missing_key)


def wrong_value(value: object, annotation: Any, marks: Iterable[Any], problem: str = "") -> str:
    """Return the message for a value that a field does not accept, with the accepted values.

    Args:
        value: the given value.
        annotation: the field's annotation.
        marks: the field's metadata, such as bounds of a number.
        problem: pydantic's error type, such as `int_parsing`.
    """
    arms = [arm for arm, _ in _arms(annotation, marks)]
    words = [word for arm in arms for word in get_args(arm) if get_origin(arm) is Literal]
    if isinstance(value, str) and (remedy := meant(value, map(str, words))):
        return f"{shown(value)} is not allowed; {remedy}"
    fact = "is not allowed" if words else _FACTS.get(problem.partition("_")[0], "is not allowed")
    wanted = _wanted(annotation, marks)
    if fact == _FACTS["string"] and isinstance(value, int | float):
        wanted = f"{wanted}, such as '{value}'"
    for noun in (_NOUNS[int], _NOUNS[float]):
        if fact == f"is not a {noun.removeprefix('a ')}" and wanted.startswith(f"{noun} "):
            wanted = f"one{wanted.removeprefix(noun)}"
    return f"{as_written(value)} {fact}; give {wanted}"


def _wanted(annotation: Any, marks: Iterable[Any] = ()) -> str:
    """Describe the values that a field accepts, such as "a whole number of 1 or more or null".

    `marks` is the field's metadata, such as bounds of a number.
    """
    words = [_plain(arm, bounds) for arm, bounds in _arms(annotation, marks)]
    return _listed(list(dict.fromkeys(words)))


def _plain(arm: Any, marks: list[Any]) -> str:
    """Describe the values that one alternative of a union accepts.

    `marks` is the alternative's metadata, such as bounds of a number.
    """
    kind, inside = get_origin(arm) or arm, get_args(arm)
    if kind in _NOUNS:
        words = f"{_NOUNS[kind]} {_bounds(marks, whole=kind is int)}".rstrip()
    elif kind is Literal:
        words = _listed([repr(word) for word in inside])
    elif kind in (tuple, list):
        words = f"a list of items, each {_wanted(inside[0])}"
    elif kinds := kinds_in(arm):
        words = f"{{kind: {kinds.pop()}}}"
    else:
        keys = list(getattr(kind, "model_fields", ()))
        words = _OTHERS.get(kind, f"settings such as {{{keys[0] if keys else 'key'}: value}}")
    return words


def _listed(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _bounds(marks: Iterable[Any], *, whole: bool) -> str:
    """Describe the bounds of a number, such as "from 1 to 8" or "above 0".

    For an integer (`whole`), exclusive bounds are converted to inclusive ones.
    """
    limits = {
        name: limit
        for mark in marks
        for name in ("ge", "gt", "le", "lt")
        if (limit := getattr(mark, name, None)) is not None
    }
    if whole:
        if "gt" in limits:
            limits["ge"] = limits.pop("gt") + 1
        if "lt" in limits:
            limits["le"] = limits.pop("lt") - 1
        if limits.get("le", 0) >= LARGEST:
            del limits["le"]
    said = {name: f"{limit:g}" if limit % 1 else f"{limit:.0f}" for name, limit in limits.items()}
    if "ge" in said and (most := said.get("le") or ("lt" in said and f"below {said['lt']}")):
        return f"from {said['ge']} to {most}"
    words = {"ge": "of {} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return " and ".join(words[name].format(limit) for name, limit in said.items())


def _arms(annotation: Any, marks: Iterable[Any] = ()) -> list[tuple[Any, list[Any]]]:
    """Return the alternatives of a union, each with its metadata; nested unions are flattened.

    For an annotation that is not a union, the result contains only the annotation.
    """
    bounds = [
        bound
        for mark in marks
        for bound in (mark.metadata if isinstance(mark, FieldInfo) else [mark])
    ]
    if get_origin(annotation) is Annotated:
        inside, *more = get_args(annotation)
        return _arms(inside, [*bounds, *more])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for part in get_args(annotation) for arm in _arms(part, bounds)]
    return [(annotation, bounds)]


def _field_at(config: "type[Config]", path: list[str]) -> tuple[Any, list[Any], int]:
    """Find the annotation of the value at a path inside a config.

    Returns:
        The annotation, its metadata, and the number of leading parts of `path` that lead to it.
    """
    field = config.model_fields.get(path[0]) if path else None
    if field is None:
        return Any, [], len(path)
    annotation, marks, depth = field.annotation, field.metadata, 1
    for part in path[1:]:
        # Pydantic also names the alternative of a union, such as `literal['all']`; it is no index.
        containers = (tuple, list, dict) if part.isdigit() else (dict,)
        inside = [arm for arm, _ in _arms(annotation) if get_origin(arm) in containers]
        if not inside:
            break
        arm = inside[0]
        annotation, marks = get_args(arm)[1 if get_origin(arm) is dict else 0], []
        depth += 1
    return annotation, marks, depth


def _beside(fields: Mapping[str, Any], path: list[str]) -> list[str]:
    """Return the other keys of the mapping that contains the value at a path.

    Args:
        fields: the values that a config was built from.
        path: a field and a key in it. For other paths the result is empty.
    """
    if len(path) != 2 or not isinstance(named := fields.get(path[0]), dict):  # noqa: PLR2004
        return []
    return [str(name) for name in cast(dict[Any, Any], named) if str(name) != path[1]]


def _unknown_kind(config: "type[Config]", path: list[str], kind: str, known: Iterable[str]) -> str:
    remedy = config.elsewhere.get(f"{'.'.join(path)}={kind}") or nearest(kind, known)
    return f"unknown kind {shown(kind)}; {remedy}"


def _kinds_known(config: "type[Config]", path: list[str]) -> str:
    """Return the end of an error message that lists the kinds of config allowed at a path."""
    kinds = kinds_in(_field_at(config, path)[0])
    return nearest("", kinds) if kinds else "add one"


def _no_settings(value: Any, config: "type[Config]", path: list[str]) -> str:
    """Return the message for a value that is not a mapping although a config is expected."""
    field = config.model_fields.get(path[0]) if path else None
    if isinstance(value, str) and field and (kinds := kinds_in(field.annotation)):
        return _unknown_kind(config, path, value, kinds)
    return f"expected settings, got {as_written(value)}; write key: value, or {{key: value}}"


def _without_tag(config: "type[Config]", path: list[str]) -> list[str]:
    """Remove the union tag (a `kind`) that pydantic may append to the path of an error.

    The result is the path in the user's file. The tag follows the field's name, or the key or index
    within that field.
    """
    field = config.model_fields.get(path[0]) if path else None
    annotation = field.annotation if field else None
    depth = 2 if get_origin(annotation) in (dict, list, tuple) else 1
    tagged = len(path) == depth + 1 and path[-1] in _tags(annotation)
    return path[:-1] if tagged else path


def kinds_in(annotation: Any) -> set[str]:
    """Return the values of `kind` of the configs that a field accepts.

    Empty if the field also accepts a plain string, which could be mistaken for a `kind`.
    """
    return set() if str in alternatives(annotation) else _tags(annotation)


def _tags(annotation: Any) -> set[str]:
    configs = [
        kind
        for kind in alternatives(annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    return {
        config.model_fields["kind"].default for config in configs if "kind" in config.model_fields
    }


def alternatives(annotation: Any) -> list[Any]:
    """Return the types in an annotation, without unions and containers.

    `int | None` gives int and NoneType, `list[str]` gives str.
    """
    inside = get_args(annotation)
    return [kind for part in inside for kind in alternatives(part)] if inside else [annotation]
