"""A jinja environment for templates that somebody else wrote: no reach, bounded time and memory.

Chat templates come with downloaded models. Jinja's immutable sandbox keeps them from the machine,
not from eating it: `'a' * 10**10`, nested loops, `[x, x]` doubled thirty times. Templates need
little, so only that little is there: known functions, methods and filters, all of which count
against a budget of steps, characters and seconds.
"""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 100_000
"""Characters of a template."""
MAX_TEXT = 4_000_000
"""Characters of one text that a template makes."""
MAX_WORK = 40_000_000
"""Characters of all texts that a rendering makes, those it throws away included."""
MAX_STEPS = 200_000
"""Loop iterations and calls of one rendering."""
MAX_SECONDS = 10.0
"""Of one rendering."""
MAX_ITEMS = 100_000
"""Entries of one list."""
MAX_NUMBER = 2**63

_TEXT_METHODS = """capitalize endswith find isdigit lower lstrip removeprefix removesuffix rsplit
rstrip split splitlines startswith strip title upper"""
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_TEXT_METHODS.split())),
    (dict, frozenset(("get", "items", "keys", "values"))),
    (LoopContext, frozenset(("changed", "cycle"))),
)
"""What a template may call on a value; none makes more than it was given."""
_FILTERS = """capitalize count d default first int items last length lower rejectattr reverse
selectattr title trim upper"""
FILTERS = frozenset(_FILTERS.split())
"""Jinja's own filters that are kept as they are."""
ITEM_SIZE = 16
"""One more entry of a list counts as so many characters."""


class LimitError(TemplateError):
    """The template does what no chat template needs."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for one rendering of one chat template."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._print,
        )
        self._steps = self._work = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self.filters = {name: self.filters[name] for name in FILTERS} | {
            "join": self._join,
            "list": lambda items: list(self._counted(items)),
            "replace": self._replace,
            "safe": lambda text: text,  # nothing is escaped here
            "string": lambda value: str(self._print(value)),
            "tojson": self._tojson,
            "_counted": self._counted,
            "_flat": self._flat,
            "_spent": self._spent,
        }
        self.globals = {
            "range": _range,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
        }

    def spend(self, characters: int) -> None:
        """Count one step, and the size of what it makes."""
        self._steps += 1
        self._work += characters
        if self._steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise LimitError(f"takes more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds")
        if characters > MAX_TEXT or self._work > MAX_WORK:
            raise LimitError(f"makes a text of more than {MAX_TEXT:,} characters")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.spend(len(left) + len(right))
        elif operator == "+" and isinstance(left, list) and isinstance(right, list):
            self.spend(ITEM_SIZE * _checked_length(len(left) + len(right)))
        elif operator == "**" or not (_is_number(left) and _is_number(right)):
            kinds = f"{type(left).__name__} {operator} {type(right).__name__}"
            raise LimitError(f"computes {kinds}; only sums of texts and of lists may be")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise LimitError(f"makes a number beyond {MAX_NUMBER}")
        return result

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        owner = getattr(called, "__self__", None)
        is_known = (
            isinstance(called, Macro)
            or any(called is function for function in self.globals.values())
            or any(type(owner) is kind and called.__name__ in names for kind, names in METHODS)
        )
        if not is_known:
            name = getattr(called, "__name__", type(called).__name__)
            raise LimitError(f"calls {name!r}, which chat templates may not")
        self.spend(len(owner) if isinstance(owner, str) else 0)
        result = super().call(context, called, *args, **kwargs)
        if isinstance(result, list):
            self.spend(ITEM_SIZE * _checked_length(len(result)))
        return result

    def _print(self, value: Any) -> Any:
        """What `{{ }}` prints. Lists are not printed: their text may be far larger than they."""
        if value is not None and not isinstance(value, str | int | float | Undefined):
            raise LimitError(f"prints a {type(value).__name__}; use the filter tojson")
        self.spend(len(value) if isinstance(value, str) else 0)
        return value

    def _counted(self, items: Iterable[Any], cost: int = 0) -> Iterator[Any]:
        for item in items:
            self.spend(cost)
            yield item

    @pass_context  # so that the compiler does not take it for a constant
    def _spent(self, _: Any, text: str, cost: int) -> str:
        self.spend(cost)
        return text

    def _join(self, items: Iterable[Any], separator: str = "") -> str:
        texts: list[str] = []
        size = 0
        for item in self._counted(items):
            texts.append(str(self._print(item)))
            size += len(texts[-1]) + len(separator)
            if size > MAX_TEXT:
                self.spend(size)
        return separator.join(texts)

    def _replace(self, text: str, old: str, new: str) -> str:
        self.spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new)

    def _tojson(self, value: Any, indent: int | None = None) -> str:
        if indent is not None and not 0 <= indent <= 16:  # noqa: PLR2004
            raise LimitError(f"indents JSON by {indent}")
        parts: list[str] = []
        for part in json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value):
            self.spend(len(part))
            parts.append(part)
        return "".join(parts)

    def _flat(self, items: Any) -> Any:
        """Lists of mappings of values, and no deeper: nesting is how a list outgrows memory."""
        for item in items.values() if isinstance(items, dict) else items:
            inner = item.values() if isinstance(item, dict) else item
            if isinstance(item, dict | list | tuple) and any(
                isinstance(value, dict | list | tuple) for value in inner
            ):
                raise LimitError("puts lists into lists into lists")
        return items


class _Counting(NodeTransformer):
    """Puts the counting into a template: its loops, macros, joined texts and lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise LimitError("has a recursive loop, which chat templates may not")
        cost = _literal_size(node)
        self.generic_visit(node)
        node.iter = _filter("_counted", node.iter, cost)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        cost = _literal_size(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_filter("_spent", nodes.Const(""), cost)]))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("join", nodes.List(node.nodes))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_flat", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_flat", node) if node.ctx == "load" else node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        raise LimitError("reads another template, which chat templates may not")

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _literal_size(node: nodes.Node) -> int:
    """Characters that the template's own text adds each time that the node runs."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _filter(name: str, node: Any, *arguments: int) -> nodes.Filter:
    constants: list[nodes.Expr] = [nodes.Const(argument) for argument in arguments]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    _checked_length(len(numbers))
    return numbers


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _checked_length(length: int) -> int:
    if length > MAX_ITEMS:
        raise LimitError(f"makes a list of more than {MAX_ITEMS:,} entries")
    return length


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
