"""Why a config cannot be, in one line: the fact, the value and what to write instead.

pydantic finds what is wrong; the words are made from the annotation of the field where it stands.
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
"""Of a whole number; no size, count or seed is larger."""

_NOUNS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "the name of a file or folder",
}
_OTHERS = {bool: "true or false", NoneType: "null", Any: "another value", object: "another value"}
_FACTS = {
    "int": "is no whole number",
    "float": "is no number",
    "string": "is no text",
    "path": "is not a path",
    "finite": "is no finite number",
    "greater": "is too small",
    "less": "is too large",
}
"""By the first word of what pydantic calls the problem."""
_NO_LIST = {"tuple_type", "list_type"}
_NO_SETTINGS = {"dict_type", "model_type", "model_attributes_type"}


class ConfigError(WorkhorseError):
    """A config that cannot be: where (`path`, dotted) and why (`reason`).

    `unknown_key` is the key that the config at `path` has not, and `missing_key` the one that it
    must have, where that is the reason.
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
        """The same of a config that stands at `path` of another."""
        whole = ".".join(part for part in (path, self.path) if part)
        return ConfigError(self.reason, whole, self.unknown_key, self.missing_key)


def as_written(value: object) -> str:
    """A value as a recipe has it: `null` and `true`, where Python says None and True."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)


def first_problem(
    config: "type[Config]", error: ValidationError, fields: Mapping[str, Any]
) -> ConfigError:
    """The first of pydantic's findings, unknown keys before others, as one line."""
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"]]
    value = problem["input"]
    context = problem.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):  # a config inside this one, or a rule of this one
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
        case "union_tag_not_found":
            remedy = meant(path[-1], _beside(fields, path)) or _kinds_known(config, path)
            reason = f"{shown(value)} has no 'kind'; {remedy}"
        case "value_error":
            reason = str(cause)
        case kind if kind in _NO_LIST:
            what = f"is one text; write [{shown(value)}]" if isinstance(value, str) else "is none"
            reason = f"a list is needed, and {as_written(value)} {what}"
        case kind if kind in _NO_SETTINGS:
            reason = _no_settings(value, config, path)
        case kind:
            annotation, marks, depth = _field_at(config, path)
            reason = wrong_value(value, annotation, marks, kind)
            path = path[:depth]  # without the arm of a union, which pydantic puts last
    return ConfigError(reason, ".".join(_without_tag(config, path)), unknown_key, missing_key)


def wrong_value(value: object, annotation: Any, marks: Iterable[Any], problem: str = "") -> str:
    """Why a value may not stand in a field, and what may.

    Args:
        value: that was given.
        annotation: of the field.
        marks: its metadata, which may hold bounds.
        problem: pydantic's name for it.
    """
    arms = [arm for arm, _ in _arms(annotation, marks)]
    words = [word for arm in arms for word in get_args(arm) if get_origin(arm) is Literal]
    if isinstance(value, str) and (remedy := meant(value, map(str, words))):
        return f"{shown(value)} is not allowed; {remedy}"
    fact = "is not allowed" if words else _FACTS.get(problem.partition("_")[0], "is not allowed")
    wanted = _wanted(annotation, marks)
    if fact == _FACTS["string"] and isinstance(value, int | float):
        wanted = f"{wanted}, as '{value}'"
    for noun in (_NOUNS[int], _NOUNS[float]):
        if fact == f"is no {noun.removeprefix('a ')}" and wanted.startswith(f"{noun} "):
            wanted = f"one{wanted.removeprefix(noun)}"
    return f"{as_written(value)} {fact}; give {wanted}"


def _wanted(annotation: Any, marks: Iterable[Any] = ()) -> str:
    """What may stand in a field, in words: a whole number of 1 or more, 'auto' or null."""
    words = [_plain(arm, bounds) for arm, bounds in _arms(annotation, marks)]
    return _listed(list(dict.fromkeys(words)))


def _plain(arm: Any, marks: list[Any]) -> str:
    """One alternative in words."""
    kind, inside = get_origin(arm) or arm, get_args(arm)
    if kind in _NOUNS:
        words = f"{_NOUNS[kind]} {_bounds(marks, whole=kind is int)}".rstrip()
    elif kind is Literal:
        words = _listed([repr(word) for word in inside])
    elif kind in (tuple, list):
        words = f"a list, each of it {_wanted(inside[0])}"
    elif kinds := kinds_in(arm):
        words = f"{{kind: {kinds.pop()}}}"
    else:
        keys = list(getattr(kind, "model_fields", ()))
        words = _OTHERS.get(kind, f"settings, as {{{keys[0] if keys else 'key'}: value}}")
    return words


def _listed(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _bounds(marks: Iterable[Any], *, whole: bool) -> str:
    """The limits of a number in words; of a whole one the least and the largest that may be."""
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
    """The alternatives of a union, whatever it is made of, each with its bounds."""
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
    """What may stand at a path: the annotation, its marks, and how deep the path led to it."""
    field = config.model_fields.get(path[0]) if path else None
    if field is None:
        return Any, [], len(path)
    annotation, marks, depth = field.annotation, field.metadata, 1
    for _ in path[1:]:
        inside = [arm for arm, _ in _arms(annotation) if get_origin(arm) in (tuple, list, dict)]
        if not inside:
            break
        arm = inside[0]
        annotation, marks = get_args(arm)[1 if get_origin(arm) is dict else 0], []
        depth += 1
    return annotation, marks, depth


def _beside(fields: Mapping[str, Any], path: list[str]) -> list[str]:
    """The other names in the mapping of names that a path leads into; none elsewhere."""
    if len(path) != 2 or not isinstance(named := fields.get(path[0]), dict):  # noqa: PLR2004
        return []
    return [str(name) for name in cast(dict[Any, Any], named) if str(name) != path[1]]


def _unknown_kind(config: "type[Config]", path: list[str], kind: str, known: Iterable[str]) -> str:
    remedy = config.elsewhere.get(f"{'.'.join(path)}={kind}") or nearest(kind, known)
    return f"unknown kind {shown(kind)}; {remedy}"


def _kinds_known(config: "type[Config]", path: list[str]) -> str:
    """The kinds that settings at a path may have."""
    kinds = kinds_in(_field_at(config, path)[0])
    return nearest("", kinds) if kinds else "give it one"


def _no_settings(value: Any, config: "type[Config]", path: list[str]) -> str:
    """Why a value that is no mapping cannot stand where settings are expected."""
    field = config.model_fields.get(path[0]) if path else None
    if isinstance(value, str) and field and (kinds := kinds_in(field.annotation)):
        return _unknown_kind(config, path, value, kinds)
    return f"{as_written(value)} is not settings; write them as key: value, or {{key: value}}"


def _without_tag(config: "type[Config]", path: list[str]) -> list[str]:
    """Drop the union tag that pydantic may put last, so that the path reads as in the file.

    It stands after the field's name, or after the key or index within that field.
    """
    field = config.model_fields.get(path[0]) if path else None
    annotation = field.annotation if field else None
    depth = 2 if get_origin(annotation) in (dict, list, tuple) else 1
    tagged = len(path) == depth + 1 and path[-1] in _tags(annotation)
    return path[:-1] if tagged else path


def kinds_in(annotation: Any) -> set[str]:
    """The kinds of config that a field may hold; none where it may be a text as well."""
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
    """The types a field may have: `int | None` gives int and None."""
    inside = get_args(annotation)
    return [kind for part in inside for kind in alternatives(part)] if inside else [annotation]
