"""Apply settings from the command line, `section.key=value`, to the fields of a config."""

import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, cast

from workhorse.config.base import ConfigError, check_colons, parse_yaml
from workhorse.errors import shown
from workhorse.files.text_formats import write_yaml

MAX_DEPTH = 64
"""Maximum number of nested sections in the path of a setting."""
LONGEST_QUOTED = 60
"""Maximum length of a value in an error that suggests quoting it; a longer one becomes `...`."""
_KIND = re.compile(r"[^=]*\.kind=")


def apply_overrides(
    data: Mapping[str, Any],
    overrides: Iterable[str],
    keep: Callable[[str, dict[str, Any], Any], dict[str, Any]] | None = None,
    kinds: Callable[[str], Container[str]] = lambda place: (),
) -> dict[str, Any]:
    """Return a copy of plain data with `section.key=value` settings applied; values are YAML.

    A section is a nested mapping. `section.kind=value` changes the kind of the section. Such
    settings are applied before all others, independent of their order.

    Args:
        data: the plain data, which is not changed.
        overrides: the settings.
        keep: a function that returns the keys and values of a section to keep when its kind
            changes. Its arguments are the section's dotted path, the section, and the new kind. If
            `keep` is None, keys of another kind are dropped.
        kinds: a function that returns the kinds accepted at a dotted path. A section that is
            written as one of these kinds (`position: rope`) is expanded to a mapping
            (`{kind: rope}`) if a setting changes a key in it.

    Raises:
        ConfigError: a setting has no `=`, or a section on its path is not a mapping.
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
    """Copy plain data. A mapping that a YAML alias repeats becomes two independent mappings."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in cast(dict[Any, Any], value).items()}
    return [_copied(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def _value_of(path: str, text: str) -> Any:
    """Parse the value of a setting as YAML, with two exceptions that stay strings.

    A single dash means stdin, not a list. A value that starts with `*` is a glob pattern, not a
    YAML alias.
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
        remedy = f"if it is a string, quote it: {safe}"
        raise ConfigError(f"{shown(f'{path}={text}')} is {error.reason}; {remedy}") from None
    check_colons(value, path)
    return value


def written(value: Any) -> str:
    """Format a value for a `key=value` setting, so that parsing it restores the value.

    Strings are written without quotes if possible, other values as YAML.
    """
    if isinstance(value, str) and _reads_back(value):
        return value
    return write_yaml(value, on_a_line=True)


def _reads_back(text: str) -> bool:
    """True if parsing `key=text` gives the string `text` itself, so that it needs no quotes."""
    try:
        return _value_of("", text) == text
    except ConfigError:
        return False


def differences(
    before: Any, now: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path, old and new value of each difference between two configs as plain data.

    If the `kind` of a section differs, the whole section is one difference.
    """
    sections = isinstance(before, dict) and isinstance(now, dict)
    old, new = cast(dict[str, Any], before), cast(dict[str, Any], now)
    if not sections or old.get("kind") != new.get("kind"):
        if before != now:
            yield path, before, now
        return
    for key in [*old, *(key for key in new if key not in old)]:
        yield from differences(old.get(key), new.get(key), (*path, str(key)))
