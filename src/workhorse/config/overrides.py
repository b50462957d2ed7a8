"""Settings of the command line, `section.key=value`, written over plain data."""

import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, cast

from workhorse.config.base import ConfigError, check_colons, parse_yaml
from workhorse.errors import shown
from workhorse.files.text_formats import write_yaml

MAX_DEPTH = 64
"""Names in the path of a setting."""
LONGEST_QUOTED = 60
"""Characters of a value that an error repeats."""
_KIND = re.compile(r"[^=]*\.kind=")


def apply_overrides(
    data: Mapping[str, Any],
    overrides: Iterable[str],
    keep: Callable[[str, dict[str, Any], Any], dict[str, Any]] | None = None,
    kinds: Callable[[str], Container[str]] = lambda place: (),
) -> dict[str, Any]:
    """Plain data with `section.key=value` settings written into it; values are read as YAML.

    `section.kind=value` makes the section one of that kind. It comes before other settings of the
    section, wherever it stands among them.

    Args:
        data: left as it is.
        overrides: the settings.
        keep: gives what a section of another kind takes over, from its dotted place, its settings
            and the new kind. None: nothing of what was said to be of another kind.
        kinds: gives the kinds that may stand at a dotted place. One of them, written as a plain
            word (`position: rope`), is a section like any other (`{kind: rope}`).

    Raises:
        ConfigError: a setting without `=`, or a path through something that is not a mapping.
    """
    result: dict[str, Any] = _copied(dict(data))
    for setting in sorted(overrides, key=lambda setting: not _KIND.match(setting)):
        path, equals, value = setting.partition("=")
        *sections, key = path.split(".")
        if not equals or not all((*sections, key)) or len(sections) > MAX_DEPTH:
            raise ConfigError(f"{shown(setting)} is not a setting; write section.key=value")
        target: dict[str, Any] = result
        for depth, section in enumerate(sections):
            inside: Any = target.get(section)
            if inside is None:
                inside = target[section] = {}
            where = ".".join(sections[: depth + 1])
            if isinstance(inside, str) and inside in kinds(where):
                inside = target[section] = {"kind": inside}
            if not isinstance(inside, dict):
                holds = f"{where} holds {shown(inside)}, not settings"
                raise ConfigError(f"{holds}; check {shown(setting)}")
            target = cast(dict[str, Any], inside)
        given = _value_of(path, value)
        if key == "kind" and target.get("kind") != given:
            kept = {} if "kind" in target else dict(target)
            if keep:
                kept = keep(".".join(sections), dict(target), given)
            target.clear()
            target.update(kept)
        target[key] = given
    return result


def _copied(value: Any) -> Any:
    """Plain data of its own, also where an alias of YAML made one mapping stand at two places."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in cast(dict[Any, Any], value).items()}
    return [_copied(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def _value_of(path: str, text: str) -> Any:
    """The value of a setting, which is YAML.

    A lone dash is the standard input and no list. What begins with `*` is a pattern: an alias of
    YAML would have nothing to refer to.
    """
    if text == "-" or text.startswith("*"):
        return text
    try:
        value = parse_yaml(text)
    except ConfigError as error:
        setting = (
            f"{path}={write_yaml(text if len(text) <= LONGEST_QUOTED else '...', on_a_line=True)}"
        )
        safe = f'"{setting}"' if not set('"$`\\!') & set(setting) else shlex.quote(setting)
        remedy = f"if it is a text, quote it: {safe}"
        raise ConfigError(f"{shown(f'{path}={text}')} is {error.reason}; {remedy}") from None
    check_colons(value, path)
    return value


def written(value: Any) -> str:
    """A value as a setting reads it back: bare where that is the same, else as YAML on a line."""
    if isinstance(value, str) and _reads_back(value):
        return value
    return write_yaml(value, on_a_line=True)


def _reads_back(text: str) -> bool:
    """Whether a setting with that text as its value means the text itself."""
    try:
        return _value_of("", text) == text
    except ConfigError:
        return False
