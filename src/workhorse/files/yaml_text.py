"""YAML that anybody wrote: plain data, read within bounds of time and memory."""

import re
import sys
from collections.abc import Callable, Hashable
from typing import Any, cast

import yaml

from workhorse.errors import WorkhorseError, shown

MAX_CHARACTERS = 300_000
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Of the whole text, what an alias stands for counted wherever it stands."""


class BadYaml(WorkhorseError):
    """A text that is not YAML, or not what may be read: line and column, if known, and why."""


class _Yaml12Loader(yaml.SafeLoader):
    """PyYAML reads `3e-4` as a string and `on` as true (YAML 1.1); YAML 1.2 does not.

    A key given twice is an error; PyYAML would keep the last. Merges (`<<: *name`), which are of
    YAML 1.1 too, are read.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Composing is recursive, and so bounded before Python's stack is.
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = cast(Any, self).peek_event().start_mark
            raise _problem(f"it is nested deeper than {MAX_DEPTH}; make it flatter", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            construct = cast(Callable[..., Any], self.construct_object)
            key = construct(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _problem("a key must be a plain word or number", key_node.start_mark)
            if key in seen:
                raise _problem(f"key {shown(key)} is given twice; keep one", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAGS = "tag:yaml.org,2002:"
_MERGE = f"{_TAGS}merge"
_SCALARS = {f"{_TAGS}{kind}" for kind in ("null", "bool", "int", "float", "str", "merge")}
_NUMBERS = {f"{_TAGS}int", f"{_TAGS}float"}

_YAML_1_2 = {
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
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
        f"{_TAGS}{_kind}", re.compile(_rule), list(_first)
    )


class _Yaml12Dumper(yaml.SafeDumper):
    """PyYAML writes the string `1e3` bare, which YAML 1.2 reads as a number: quote it."""


for _kind, (_rule, _first) in _YAML_1_2.items():
    _Yaml12Dumper.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"{_TAGS}{_kind}", re.compile(_rule), list(_first)
    )


def write_yaml(value: Any, *, on_a_line: bool = False) -> str:
    """Plain data as YAML that `parse_yaml` reads back as it was, keys in their order.

    Args:
        value: mappings, lists, strings, numbers, true, false and null.
        on_a_line: write it in one line, without a line break at its end.
    """
    flow, width = (True, 2**20) if on_a_line else (False, 80)
    text = yaml.dump(  # pyright: ignore[reportUnknownMemberType]
        value, Dumper=_Yaml12Dumper, sort_keys=False, default_flow_style=flow, width=width
    )
    return text.removesuffix("\n").removesuffix("\n...") if on_a_line else text


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML text: mappings, lists, texts, numbers, true, false and null.

    Raises:
        BadYaml: the text is not YAML, holds anything else (a date, a set, binary), or is longer,
            deeper or, its aliases written out, larger than any that a person wrote.
    """
    if len(text) > MAX_CHARACTERS:
        raise BadYaml(f"{len(text)} characters of YAML are more than {MAX_CHARACTERS}; shorten it")
    try:
        loader = _Yaml12Loader(text)
        node = loader.get_single_node()  # pyright: ignore[reportUnknownMemberType]
        if node is None:
            return None
        _weigh(node, {})
        return loader.construct_document(node)  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise BadYaml(f"not valid YAML{where}: {problem}") from None


def _weigh(node: yaml.Node, weights: dict[int, int]) -> int:
    """How many values a node is with its aliases written out.

    Raises:
        yaml.MarkedYAMLError: too many, one that contains itself, or one that is not plain data.
    """
    key = id(node)
    if key in weights:
        if not weights[key]:
            raise _problem("it refers to itself; write out what is meant", node.start_mark)
        return weights[key]
    weights[key] = 0  # while what it holds is weighed
    weight = 1
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
    elif node.tag != f"{_TAGS}{'map' if isinstance(node, yaml.MappingNode) else 'seq'}":
        raise _not_plain(node)
    for child in _children(node):
        weight += _weigh(child, weights)
        if weight > MAX_VALUES:
            problem = f"it holds more than {MAX_VALUES} values, what its aliases stand for included"
            raise _problem(f"{problem}; shorten it", node.start_mark)
    weights[key] = weight
    return weight


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        return [part for pair in pairs for part in pair]
    return cast(list[yaml.Node], node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_scalar(node: yaml.ScalarNode) -> None:
    text = cast(str, node.value)
    if node.tag not in _SCALARS:
        raise _not_plain(node)
    kind = node.tag.removeprefix(_TAGS)
    rule = _YAML_1_2.get(kind)
    if rule is not None and not re.match(rule[0], text):
        raise _problem(f"{shown(text)} is no {kind}; leave the tag out", node.start_mark)
    if node.tag in _NUMBERS and len(text) > sys.int_info.default_max_str_digits:
        raise _problem(f"a number of {len(text)} digits is too large", node.start_mark)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _problem(f"{shown(text)} holds half a character", node.start_mark)


def _not_plain(node: yaml.Node) -> yaml.MarkedYAMLError:
    kind = node.tag.replace(_TAGS, "!!")
    return _problem(f"{shown(kind)} is not read; write plain text or numbers", node.start_mark)


def _problem(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
