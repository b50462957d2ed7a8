"""A jinja environment for templates that somebody else wrote: no reach, bounded time and memory.

Chat templates come with downloaded models. Jinja's immutable sandbox keeps them from the machine,
not from eating it: `'a' * 10**10`, nested loops, `[x, x]` doubled thirty times. What transformers
offers to templates is offered here, and all of it counts against a budget of steps, characters and
seconds.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from workhorse.tokenizers.chat.filters import (
    CALLABLE,
    METHODS,
    Filters,
    bounded_method,
    check_format,
    percent,
)
from workhorse.tokenizers.chat.limits import ITEM_SIZE, Budget, LimitError, checked_length

MAX_NUMBER = 2**63
_MOST_EXPONENT = 64


class Generation(Extension):
    """`{% generation %}` round what the assistant says, which only training on it looks at."""

    tags = frozenset(("generation",))  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for one rendering of one chat template.

    Args:
        now: the time that the template is told.
    """

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, now: datetime | None = None) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=self.budget.printed,
        )
        self.filters = {
            **Filters(
                self.budget, lambda left, right: self.call_binop(None, "+", left, right)
            ).table,
            "_counted": self.budget.counted,
            "_measured": self.budget.measured,
            "_spent": self._spent,
        }
        when = now or datetime.now()
        self.globals = {
            "cycler": Cycler,
            "dict": _dict,
            "joiner": Joiner,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": _range,
            "strftime_now": lambda form: _strftime(self.budget, when, form),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "+", str(), str():
                self.budget.spend(len(left) + len(right))
            case ("+", list(), list()) | ("+", tuple(), tuple()):
                self.budget.spend(ITEM_SIZE * checked_length(len(left) + len(right)))
            case ("*", str(many), int(times)) | ("*", int(times), str(many)):
                self.budget.spend(len(many) * max(times, 0))
            case ("*", list(many), int(times)) | ("*", int(times), list(many)):
                self.budget.spend(ITEM_SIZE * checked_length(len(many) * max(times, 0)))
            case "%", str(), _:
                return percent(self.budget, left, right)
            case "**", int() | float(), int() | float() if abs(right) > _MOST_EXPONENT:
                raise LimitError(f"makes a number beyond {MAX_NUMBER}")
            case _ if not (isinstance(left, int | float) and isinstance(right, int | float)):
                kinds = f"{type(left).__name__} {operator} {type(right).__name__}"
                raise LimitError(f"computes {kinds}")
            case _:
                pass
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise LimitError(f"makes a number beyond {MAX_NUMBER}")
        return result

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        origin = getattr(called, "__wrapped__", called)  # jinja wraps str.format
        owner = getattr(origin, "__self__", None)
        name = getattr(called, "__name__", type(called).__name__)
        if not self._is_known(called, owner, name):
            raise LimitError(f"calls {name!r}, which chat templates may not")
        self.budget.spend(0)
        if isinstance(called, LoopContext):
            args = tuple(self.budget.counted(items) for items in args)
        elif isinstance(owner, str) and name == "format":
            check_format(self.budget, owner, [*args, *kwargs.values()])
        elif (result := bounded_method(self.budget, owner, name, args)) is not NotImplemented:
            return result
        result = super().call(context, called, *args, **kwargs)
        if isinstance(result, list):
            self.budget.spend(ITEM_SIZE * checked_length(len(result)))
        return result

    def _is_known(self, called: Any, owner: Any, name: str) -> bool:
        return (
            isinstance(called, (Macro, *CALLABLE))
            or any(called is function for function in self.globals.values())
            or name in METHODS.get(type(owner), ())
        )

    @pass_context  # so that the compiler does not take it for a constant
    def _spent(self, _: Any, text: str, cost: int) -> str:
        self.budget.spend(cost)
        return text


class _Counting(NodeTransformer):
    """Puts the counting into a template: its loops, macros, joined texts and lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = _literal_size(node)
        self.generic_visit(node)
        node.iter = _filter("_counted", node.iter, cost)
        if node.recursive:
            node.body.insert(0, nodes.Output([_filter("_spent", nodes.Const(""), cost)]))
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
        return _filter("_measured", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_measured", node) if node.ctx == "load" else node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        raise LimitError("reads another template, which chat templates may not")

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def literals(tree: nodes.Template) -> Iterator[str]:
    """The texts that a template holds itself."""
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        text = node.data if isinstance(node, nodes.TemplateData) else node.value
        if isinstance(text, str):
            yield text


def _literal_size(node: nodes.Node) -> int:
    """Characters that the template's own text adds each time that the node runs."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _filter(name: str, node: Any, *arguments: int) -> nodes.Filter:
    constants: list[nodes.Expr] = [nodes.Const(argument) for argument in arguments]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    checked_length(len(numbers))
    return numbers


def _dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    made = dict(*arguments, **named)
    checked_length(len(made))
    return made


def _strftime(budget: Budget, when: datetime, form: str) -> str:
    check_format(budget, form, ())
    return when.strftime(form)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
