"""Renders chat templates in jinja's sandbox, in a process that cannot do anything else.

`process.py` starts a Python process that can import the standard library and jinja2, and runs this
file. The answer to a request is a status and text. The operating system enforces its limits: the
process cannot open files or connections or start processes, and it dies if it exceeds its memory or
CPU time.
"""

import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace

_PLAIN = (str, int, float, list, tuple, dict, Undefined, type(None))
_HAS_ATTRIBUTES = (*_PLAIN, Cycler, LoopContext, Macro, Namespace)
"""Types with attributes that a template may read; not functions or classes."""
_KEPT = 8
"""Maximum number of compiled templates in the cache."""
_WARM_UP = "{{ 'a\\n' | striptags | wordwrap | pprint }}{% for i in 1 %}{% endfor %}"
"""A template that triggers jinja2's late imports while files can still be opened."""


class Generation(Extension):
    """The tag `{% generation %}` marks the assistant's text for training; rendering ignores it."""

    tags = frozenset(("generation",))  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A jinja environment with the extensions, filters and functions of transformers."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # no constant folding, which could make the compiled code huge
            finalize=_printed,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return isinstance(obj, _HAS_ATTRIBUTES) and super().is_safe_attribute(obj, attr, value)


def start(seconds: str, memory: str) -> Callable[[dict[str, Any]], str]:
    """Return the function that answers requests, after all rights have been dropped.

    Args:
        seconds: CPU time limit of each request; a signal kills the process if it is exceeded.
        memory: limit of the address space, in bytes.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _answer(_WARM_UP, {}, "0001-01-01", {})
    _give_up(int(memory))  # after the warm-up, which must open files

    def answer(request: dict[str, Any]) -> str:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        text = _answer(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return text

    return answer


def _give_up(memory: int) -> None:
    """Drop the rights to open files or connections, start processes and use more memory."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # macOS lacks this limit, or a lower one is already set
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


class Equal(str):
    """A string that is printed as it is, but compared as another string.

    It is also found as a key of a mapping, and compared after a change of case.
    """

    __slots__ = ("_other",)
    _other: str

    def __new__(cls, text: str, other: str) -> "Equal":
        made = super().__new__(cls, text)
        made._other = other
        return made

    def __eq__(self, value: object) -> bool:
        return self._other == (value._other if isinstance(value, Equal) else value)

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __hash__(self) -> int:
        return hash(self._other)

    def __contains__(self, part: str) -> bool:
        return part in self._other

    def startswith(self, *arguments: Any) -> bool:
        return self._other.startswith(*arguments)

    def endswith(self, *arguments: Any) -> bool:
        return self._other.endswith(*arguments)

    def lower(self) -> "Equal":
        return Equal(str(self), self._other.lower())

    def upper(self) -> "Equal":
        return Equal(str(self), self._other.upper())

    def strip(self, *arguments: Any) -> "Equal":
        return Equal(str(self), self._other.strip(*arguments))


def _with_equals(value: Any, equals: Mapping[str, str]) -> Any:
    """Replace the strings that are keys of `equals`, also in keys of mappings."""
    match value:
        case str():
            return Equal(value, equals[value]) if value in equals else value
        case list():
            return [_with_equals(item, equals) for item in value]
        case dict():
            return {_with_equals(k, equals): _with_equals(v, equals) for k, v in value.items()}
        case _:
            return value


def _answer(
    source: str, variables: Mapping[str, Any] | None, now: str, equals: Mapping[str, str]
) -> str:
    """Render a template; return `+` and the text, or `-` and the error message.

    If `variables` is None, return the literal strings and the variables in the template, as JSON,
    instead of its rendering.
    """
    try:
        template, facts = _compiled(source)
        if variables is None:
            return "+" + facts
        when = datetime.fromisoformat(now)
        known = _with_equals(variables, equals) if equals else variables
        return "+" + template.render({"strftime_now": when.strftime, **known})
    except MemoryError:
        raise  # ends the process
    except Exception as error:  # a compiled template may raise any exception
        return f"-{error or type(error).__name__}"


@lru_cache(_KEPT)
def _compiled(source: str) -> tuple[Template, str]:
    tree = ENVIRONMENT.parse(source)
    # Compiling changes the tree.
    facts = json.dumps([[*_literals(tree)], [*find_undeclared_variables(tree)]])
    return Template.from_code(ENVIRONMENT, ENVIRONMENT.compile(tree), ENVIRONMENT.globals), facts


def _literals(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        text = node.data if isinstance(node, nodes.TemplateData) else node.value
        if isinstance(text, str):
            yield text


@pass_context  # keeps the compiler from finalizing constants itself
def _printed(_: Any, value: Any) -> Any:
    if not _is_plain(value):
        raise TemplateError(f"it prints a {type(value).__name__}; print strings, numbers and lists")
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _tojson(  # the signature in transformers
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


ENVIRONMENT = ChatEnvironment()
