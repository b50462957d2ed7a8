"""The filters and methods that a chat template may use, each within the budget of its rendering.

Most of jinja's filters make nothing larger than what they are given; those are kept, and what they
make is counted. The few that can make much out of little are bounded before they do it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.filters import FILTERS, do_indent, do_wordwrap
from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Cycler, Joiner, pass_environment

from workhorse.tokenizers.chat.limits import (
    ITEM_SIZE,
    MAX_ITEMS,
    MAX_TEXT,
    Budget,
    LimitError,
    checked_length,
    checked_width,
)

_TEXT_METHODS = """capitalize casefold center count endswith expandtabs find format index isalnum
isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition
rsplit rstrip split splitlines startswith strip swapcase title upper zfill"""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    LoopContext: frozenset(("changed", "cycle")),
    Cycler: frozenset(("next", "reset")),
}
"""What a template may call on a value."""
CALLABLE = (Joiner, LoopContext)
"""Values that it may call themselves."""

_KEPT = """abs attr batch capitalize count d default dictsort e escape filesizeformat first float
forceescape groupby int items last length lower map max min random reject rejectattr reverse round
select selectattr slice sort striptags title trim truncate unique upper urlencode urlize wordcount
xmlattr"""
_OWN = "center format indent join list pprint replace safe string sum tojson wordwrap"
_SIZED = ("batch", "round", "slice")
"""Filters whose numbers say how much they make."""
_WIDE = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{4}|\*|\d*\.(\d{4}|\*))|\{[^{}]*:[^{}]*(\d{4}|\{)")
"""A width in a format that is too large, or comes from elsewhere."""
_MOST_INDENT = 16


class Filters:
    """The filters that are not jinja's own.

    Args:
        budget: of the rendering.
        add: the environment's own sum of two values.
    """

    def __init__(self, budget: Budget, add: Callable[[Any, Any], Any]) -> None:
        self._budget = budget
        self._add = add

    @property
    def table(self) -> dict[str, Callable[..., Any]]:
        """All filters by name."""
        kept = {name: _bounded(self._budget, name) for name in _KEPT.split()}
        return kept | {name: getattr(self, name) for name in _OWN.split()}

    def pprint(self, value: Any) -> str:
        return str(FILTERS["pprint"](self._budget.printed(value)))

    def safe(self, text: Any) -> Any:
        return text  # nothing is escaped here

    def string(self, value: Any) -> str:
        return str(self._budget.printed(value))

    def sum(self, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        for item in self._budget.counted(items):
            start = self._add(start, item if attribute is None else item[attribute])
        return start

    def list(self, items: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for item in self._budget.counted(items, ITEM_SIZE):
            found.append(item)
            checked_length(len(found))
        return found

    @pass_environment
    def join(
        self,
        environment: SandboxedEnvironment,
        items: Iterable[Any],
        d: str = "",
        attribute: Any = None,
    ) -> str:
        if attribute is not None:
            items = (environment.getitem(item, attribute) for item in items)
        return join(self._budget, d, items)

    def center(self, text: Any, width: int = 80) -> str:
        return str(text).center(checked_width(width))

    def indent(self, text: str, width: Any = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else checked_width(width)
        self._budget.spend(len(text) + (text.count("\n") + 1) * size)
        return do_indent(text, width, first, blank)

    @pass_environment
    def wordwrap(
        self, environment: SandboxedEnvironment, text: str, *options: Any, **named: Any
    ) -> str:
        given = (*options, *named.values())
        longest = max((len(option) for option in given if isinstance(option, str)), default=1)
        self._budget.spend(len(text) * (1 + longest))
        return do_wordwrap(environment, text, *options, **named)

    def format(self, text: Any, *values: Any, **named: Any) -> str:
        return percent(self._budget, str(text), named or values)

    def replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        times = -1 if count is None else count
        return replace(self._budget, str(text), str(old), str(new), times)

    def tojson(  # as transformers has it
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MOST_INDENT):
            raise LimitError(f"indents JSON by {str(indent)[:40]}")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        parts: list[str] = []
        for part in encoder.iterencode(value):
            self._budget.spend(len(part))
            parts.append(part)
        return "".join(parts)


def bounded_method(budget: Budget, owner: Any, name: str, arguments: Any) -> Any:
    """What a method gives that could make much out of little; NotImplemented for the others."""
    if not isinstance(owner, str):
        return NotImplemented
    budget.spend(len(owner))
    match name, arguments:
        case "replace", (str() as old, str() as new, *rest):
            return replace(budget, owner, old, new, *rest)
        case "join", (items,):
            return join(budget, owner, items)
        case "center" | "ljust" | "rjust" | "zfill", (width, *_):
            budget.spend(checked_width(width))
        case "expandtabs", _:
            budget.spend(owner.count("\t") * checked_width(arguments[0] if arguments else 8))
        case "split" | "rsplit", (str() as separator, *_) if separator:
            if len(owner) > MAX_ITEMS:
                checked_length(owner.count(separator))
        case _:
            pass
    return NotImplemented


def check_format(budget: Budget, text: str, values: Any) -> None:
    """Refuse a format whose result is much larger than it and its values."""
    if _WIDE.search(text):
        raise LimitError(f"formats with {text[:40]!r}; use plain fields")
    items = values if isinstance(values, tuple | list) else (values,)
    longest = max((len(str(budget.printed(item))) for item in items), default=0)
    budget.spend(len(text) + (text.count("%") + text.count("{")) * max(longest, 999))


def percent(budget: Budget, text: str, values: Any) -> str:
    """`text % values`."""
    check_format(budget, text, tuple(values.values()) if isinstance(values, Mapping) else values)
    return text % values


def replace(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`."""
    budget.spend(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def join(budget: Budget, separator: str, items: Iterable[Any]) -> str:
    """`separator.join(items)`, whatever the items are."""
    texts: list[str] = []
    size = 0
    for item in budget.counted(items):
        texts.append(str(budget.printed(item)))
        size += len(texts[-1]) + len(separator)
        if size > MAX_TEXT:
            budget.spend(size)
    return separator.join(texts)


def _bounded(budget: Budget, name: str) -> Callable[..., Any]:
    """A filter of jinja's whose result is counted."""
    kept = FILTERS[name]

    def called(*arguments: Any, **named: Any) -> Any:
        if name in _SIZED:
            for value in (*arguments[1:], *named.values()):
                if isinstance(value, int):
                    checked_width(value)
        result = kept(*arguments, **named)
        if isinstance(result, str):
            budget.spend(len(result))
            return str(result)  # no Markup, which escapes what it is added to
        if isinstance(result, list):
            budget.spend(ITEM_SIZE * checked_length(len(result)))
        return result

    if hasattr(kept, "jinja_pass_arg"):  # how the compiler learns what to call it with
        called.jinja_pass_arg = kept.jinja_pass_arg  # pyright: ignore[reportFunctionMemberAccess]
    return called
