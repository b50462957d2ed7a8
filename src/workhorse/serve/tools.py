"""Tools of a request: which calls are allowed, and the grammar of replies with such calls."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workhorse.serve.errors import bad_request
from workhorse.serve.schema import (
    MOST_GRAMMAR,
    TOO_LONG,
    AllowedTools,
    FunctionTool,
    NamedTool,
    ToolChoice,
)
from workhorse.tokenizers import Tokenizer
from workhorse.tokenizers.chat.reply_format import ID, CallFormat, ReplyFormat, Tagged

ANYTHING = "/(?s:.*)/"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call."""

    functions: dict[str, dict[str, Any]]
    """The schema of the parameters of each function."""
    described: list[dict[str, Any]]
    """The functions as chat templates read them."""
    must_call: bool = False
    only_one: bool = False
    """True if a reply may have one call."""
    is_strict: bool = False
    """True if a function asks that its arguments always fit the schema."""

    @property
    def needs_grammar(self) -> bool:
        """True if a reply that is not allowed can only be prevented by a grammar."""
        return self.must_call or self.only_one or self.is_strict


def tools_of(
    asked: Sequence[FunctionTool], choice: ToolChoice | None = None, *, parallel: bool = True
) -> Tools | None:
    """Return the tools of a request; None if the reply cannot call any.

    Args:
        asked: the tools.
        choice: which tools may or must be called.
        parallel: True if a reply may have several calls.

    Raises:
        ApiError: `tools` and `tool_choice` do not fit each other.
    """
    given = {tool.function.name: tool.function for tool in asked}
    if len(given) < len(asked):
        names = [tool.function.name for tool in asked]
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_request(f"two functions have the name {twice!r}; rename one", "tools")
    if not given:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools; give them, or omit it", "tool_choice")
        return None
    if choice == "none":
        return None
    names, must_call = [*given], choice == "required"
    if isinstance(choice, NamedTool):
        names, must_call = [choice.function.name], True
    if isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        must_call = choice.allowed_tools.mode == "required"
    for name in names:
        if name not in given:
            raise bad_request(
                f"tool_choice names {name!r}, which is not in tools; choose from: "
                f"{', '.join(given)}",
                "tool_choice",
            )
    named = isinstance(choice, NamedTool)
    described = [*given] if named else names  # a named tool leaves the prompt as it is
    return Tools(
        {name: given[name].parameters or NO_PARAMETERS for name in names},
        [
            {"type": "function", "function": given[name].model_dump(exclude_unset=True)}
            for name in described
        ],
        must_call=must_call,
        only_one=named or not parallel,
        is_strict=any(given[name].strict for name in names),
    )


def grammar_of(
    tools: Tools,
    format: ReplyFormat,
    tokenizer: Tokenizer,
    ends: Collection[int],
    content: dict[str, Any] | None = None,
) -> str:
    """Return the grammar of the replies that are allowed, in llguidance's variant of Lark.

    Args:
        tools: the tools.
        format: how the model writes replies.
        tokenizer: the model's tokenizer.
        ends: ids that end a reply.
        content: JSON schema of the content of a reply without calls; None: any text.

    Raises:
        ValueError: it has too many characters.
    """
    assert format.calls is not None
    calls, rules = format.calls, _Rules(tokenizer)
    if calls.tagged is not None:
        for name, schema in tools.functions.items():
            _check_tagged(name, schema, is_strict=tools.is_strict)
    call = rules.rule(
        " | ".join(rules.call(calls, name, schema) for name, schema in tools.functions.items())
    )
    more = ""
    if calls.between and not tools.only_one:
        more = f"({rules.literal(calls.between, digits=True)} {call})*"
    rest = f"{call} {more} {rules.literal(rules.without_ends(calls.end, ends))}"
    start = f"{rules.literal(calls.begin)} {rest}"
    if tools.must_call:
        start = f"{rules.reasoning(format)} {start}"
    elif content is not None:
        start = f"{rules.reasoning(format)} ({start} | {_json(content)})"
    elif calls.is_tag:
        start = f"{ANYTHING} | {rules.until(calls.begin)} {rest}"
    else:
        start += r" | /([^{\[\s](?s:.*))?/"
    return "\n".join([f"start: {start}", *rules.rules])


def grammar_of_content(schema: dict[str, Any], format: ReplyFormat, tokenizer: Tokenizer) -> str:
    """Return the grammar of JSON after reasoning, in llguidance's variant of Lark.

    Args:
        schema: JSON schema of the content.
        format: how the model writes replies.
        tokenizer: the model's tokenizer.
    """
    rules = _Rules(tokenizer)
    return "\n".join([f"start: {rules.reasoning(format)} {_json(schema)}", *rules.rules])


OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
OF_STRINGS = ("type", "enum")
NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
"""Keywords of JSON schemas that tagged arguments can have, and those that allow everything."""


def _check_tagged(name: str, schema: Mapping[str, Any], *, is_strict: bool) -> None:
    """Check that a grammar of tagged arguments can express a schema."""
    properties = schema.get("properties", {})
    for key in properties:
        if not re.fullmatch(r"[^\s<>]+", key):
            raise bad_request(
                f"the function {name!r} has a parameter {key[:40]!r}, which this model's format "
                "cannot express; rename it without spaces and angle brackets",
                "tools",
            )
    if not is_strict:
        return
    strings = {
        key: one
        for key, one in properties.items()
        if isinstance(one, dict) and one.get("type") == "string"
    }
    unknown = [word for word in schema if word not in (*OF_OBJECTS, *NOTES)]
    known = (*OF_STRINGS, *NOTES)
    unknown += [word for one in strings.values() for word in one if word not in known]
    unknown += [key for key in schema.get("required", ()) if key not in properties]
    if unknown:
        raise bad_request(
            f"the function {name!r} is strict, and this model's format of arguments cannot enforce "
            f"{unknown[0]!r} in its schema; remove it, or omit strict",
            "tools",
        )


class _Rules:
    """The rules of a grammar, and the expressions that use them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.rules: list[str] = []
        self._size = 0
        self._special = tokenizer.special_tokens
        names = sorted((re.escape(name) for name in self._special), key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join([*names, ID])})")

    def reasoning(self, format: ReplyFormat) -> str:
        """Return an expression of the reasoning; empty if there is none."""
        if format.reasoning is None:
            return ""
        begin, end = format.reasoning
        rest = f"{self.until(end)} /[ \\n]{{0,4}}/"
        return rest if format.begins_in_reasoning else f"({self.literal(begin)} {rest})?"

    def without_ends(self, text: str, ends: Collection[int]) -> str:
        """Remove the tokens at the end of a string that end a reply."""
        for name, token in self._special.items():
            if token in ends and text.endswith(name):
                return self.without_ends(text.removesuffix(name).rstrip(), ends)
        return text

    def rule(self, alternatives: str, options: str = "") -> str:
        """Add a rule, and return its name. Raises ValueError if the grammar becomes too long."""
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}{options}: {alternatives}")
        self._size += len(self.rules[-1])
        if self._size > MOST_GRAMMAR:  # before more are made
            raise ValueError(TOO_LONG)
        return name

    def literal(self, text: str, *, digits: bool = False) -> str:
        """Return an expression of a string; with `digits`, of other numbers in their place too."""
        parts: list[str] = []
        for part in self._parts.split(text):
            if part in self._special:
                parts.append(f"<[{self._special[part]}]>")
            elif part == ID:
                parts.append("/[a-z0-9]{9}/")
            elif digits:
                pieces = re.split(r"(\d+)", part)
                parts += ["/[0-9]{1,3}/" if one.isdigit() else _text(one) for one in pieces]
            else:
                parts.append(_text(part))
        return " ".join(part for part in parts if part)

    def until(self, end: str) -> str:
        """Return an expression of any text up to and including a string."""
        first, *rest = [part for part in self._parts.split(end) if part]
        after = self.literal("".join(rest))
        if first in self._special:
            return f"{ANYTHING} {self.literal(first)} {after}"
        return f"{self.rule(ANYTHING, f'[suffix={_text(first)}]')} {after}"

    def call(self, calls: CallFormat, name: str, schema: dict[str, Any]) -> str:
        """Return an expression of a call, from its name to the end of its arguments."""
        start = f"{_text(name)} {self.literal(calls.after_name, digits=True)}"
        if calls.tagged is None:
            return f"{start} {_json(schema)}"
        return f"{start} {self._tagged(calls.tagged, schema)}"

    def _tagged(self, tags: Tagged, schema: Mapping[str, Any]) -> str:
        """Return an expression of tagged arguments, in the order of the schema."""
        properties = schema.get("properties", {})
        required = {*schema.get("required", ())}
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        values = {key: self._argument(tags, key, one, shared) for key, one in properties.items()}
        if tags.first == tags.next:
            first = self.literal(tags.first)
            every = {key: f"{first} {value}" for key, value in values.items()}
            return " ".join(one if key in required else f"({one})?" for key, one in every.items())
        first, following, rest = self.literal(tags.first), self.literal(tags.next), ""
        alternatives = [first]
        for key, value in reversed(values.items()):
            alternatives = [] if key in required else alternatives
            alternatives.append(f"{first} {value} {rest}")
            one = f"{following} {value}"
            rest = self.rule(f"{one if key in required else f'({one})?'} {rest}")
        return f"({' | '.join(reversed(alternatives))})"

    def _argument(self, tags: Tagged, key: str, schema: Any, shared: Mapping[str, Any]) -> str:
        schema = schema if isinstance(schema, dict) else {}
        is_string = schema.get("type") == "string"
        kind = 0 if is_string else 1
        start, close = f"{_text(key)} {self.literal(tags.open[kind])}", tags.close[kind]
        if not is_string:
            return self.rule(f"{start} {_json({**shared, **schema})} {self.literal(close)}")
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
            texts = " | ".join(_text(one) or '""' for one in choices)
            return self.rule(f"{start} ({texts}) {self.literal(close)}")
        return self.rule(f"{start} {self.until(close)}")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _json(schema: Mapping[str, Any]) -> str:
    from workhorse.serve.grammar import WHITESPACE

    options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
