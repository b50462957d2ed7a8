"""The format of replies: the text around reasoning, tool calls and their arguments."""

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

ID = "qIdentone"
"""The id of a call in the text of a `CallFormat`. Some templates require nine characters."""
IDS = (ID, "qIdenttwo")
_TO_A_TAG = re.compile(r"[^<]*(<[^<>]*>)?")
"""Matches the beginning of a string, up to the end of its first tag."""
_BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
_STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}


def check_json(value: object) -> None:
    """Check that a value can be sent as JSON.

    Raises:
        ValueError: it has a number that is not finite, or half of a surrogate pair.
        TypeError: it has a value that JSON does not have.
    """
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Tagged:
    """The format of arguments in tags: each key and each value is enclosed."""

    first: str
    """Text before the first key."""
    next: str
    """Text before a further key."""
    open: tuple[str, str]
    """Text between a key and its value: before a string, and before another value."""
    close: tuple[str, str]
    """Text after a value, in the same order."""

    @property
    def marks_strings(self) -> bool:
        """True if the text before a value shows whether the value is a string."""
        return self.open[0] != self.open[1]

    @property
    def quote(self) -> str:
        """The text that a string begins and ends with; empty if there is none."""
        quote = self.open[0].removeprefix(self.open[1]) if self.marks_strings else ""
        return quote if quote == self.close[0].removesuffix(self.close[1]) else ""

    def end_of_nested(self, text: str, start: int) -> int:
        """Return the end of the list or mapping at `start`; `start` if there is another value."""
        if text[start : start + 1] not in ("{", "["):
            return start
        quotes = [one for one in (self.quote, '"', "'") if one]
        parts = re.compile(rf"\\.|{'|'.join(map(re.escape, quotes))}|[][{{}}]", re.DOTALL)
        depth, quote = 0, ""
        for match in parts.finditer(text, start):
            part = match[0]
            if quote:
                quote = "" if part == quote else quote
            elif part in quotes:
                quote = part
            else:
                depth += _STEPS.get(part, 0)
                if depth == 0:
                    return match.end()
        return len(text)

    def value(self, text: str) -> Any:
        """Return the value of an argument: JSON, or as in Python; else the text itself."""
        if self.quote and self.quote in text:
            parts = text.split(self.quote)
            parts[1::2] = [json.dumps(part) for part in parts[1::2]]
            text = "".join(parts)
        for one in (text, _BARE_KEY.sub(r'\1"\2":', text)):
            for read in (json.loads, ast.literal_eval):
                with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                    found = read(one)
                    check_json(found)
                    return found
        return text


class Patterns(NamedTuple):
    """Patterns of the text around the parts of calls. A name is the group `name`."""

    begin: re.Pattern[str]
    between: re.Pattern[str] | None
    end: re.Pattern[str]
    key: re.Pattern[str] | None = None
    """A key of tagged arguments: the groups `key` and, if its value is a string, `string`."""
    closes: tuple[re.Pattern[str], ...] = ()
    """The text after a string, and after another value."""


@dataclass(frozen=True)
class CallFormat:
    """The text around the parts of tool calls."""

    begin: str
    """Text from the beginning of the first call to its name."""
    after_name: str
    """Text between a name and its arguments."""
    between: str
    """Text from the end of arguments to the name of the next call; empty if a reply has one."""
    end: str
    """Text after the arguments of the last call."""
    tagged: Tagged | None = None
    """Format of the arguments; None: a JSON object."""
    arguments: Literal["mapping", "json"] = "mapping"
    """How the template reads the arguments of earlier calls."""
    content: str | None = ""
    """Content of a message that only calls tools, as the template reads it; None: no content."""

    @property
    def literals(self) -> str:
        """All of its text."""
        tags = self.tagged
        more = () if tags is None else (tags.first, tags.next, *tags.open, *tags.close)
        return "".join((self.begin, self.after_name, self.between, self.end, *more))

    @property
    def marker(self) -> str:
        """The beginning of `begin`, by which calls are recognised."""
        return re.split(rf"\s|\d|{ID}", self.begin)[0]

    @property
    def after_arguments(self) -> tuple[str, ...]:
        """Strings of which one follows arguments; none if only the end of the reply does."""
        return tuple(one.split()[-1] for one in (self.end, self.between) if one.strip())

    @property
    def is_tag(self) -> bool:
        """True if the marker can only begin a call; a bracket may also begin other text."""
        return self.marker[0] not in "{[" or self.marker[1:2].isalpha()

    @cached_property
    def patterns(self) -> Patterns:
        name = r"(?P<name>[\w.-]+)" + _pattern(self.after_name)
        begin = re.compile(_pattern(self.begin) + name)
        between = re.compile(_pattern(self.between) + name) if self.between else None
        end = re.compile(_pattern(self.end))
        if self.tagged is None:
            return Patterns(begin, between, end)
        tags = self.tagged
        ends = [match[0] for one in (self.end, self.between) if (match := _TO_A_TAG.match(one))]
        after = [re.escape(tags.next), *(_pattern(one) for one in ends if one)]
        until = f"(?={'|'.join(after)})" if len(after) > 1 else r"(?=\s*\Z)"
        start = f"(?:{re.escape(tags.first)}|{re.escape(tags.next)})"
        opens = f"(?:(?P<string>{_exact(tags.open[0])})|{_exact(tags.open[1])})"
        key = re.compile(rf"{start}(?P<key>[^\s<>]+?){opens}")
        closes = tuple(re.compile(_exact(close) + until) for close in tags.close)
        return Patterns(begin, between, end, key, closes)


def _pattern(literal: str) -> str:
    """Return a pattern of a string with other white space, numbers and ids of calls.

    Its repetitions are possessive: a template may repeat them until backtracking takes years.
    """
    parts = re.split(rf"(\s+|(?:\d|{'|'.join(IDS)})+)", literal)
    return "".join(_part(part) for part in parts)


def _part(part: str) -> str:
    if part.isspace():
        return r"\s*+"
    if part.isdigit():
        return r"\d++"
    return r"\w++" if any(id in part for id in IDS) else re.escape(part)


def _exact(literal: str) -> str:
    """Return a pattern of a string without other white space, which would belong to a value."""
    parts = re.split(r"(\s+)", literal)
    return "".join(f"\\s{{0,{len(one)}}}" if one.isspace() else re.escape(one) for one in parts)


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes the parts of a reply."""

    calls: CallFormat | None = None
    """None: the template has no format for tools."""
    reasoning: tuple[str, str] | None = None
    """Text before and after the reasoning; None: a reply has none."""
    begins_in_reasoning: bool = False
    """True if the prompt ends with the text before the reasoning."""
    headers: tuple[str, ...] = ()
    """Strings that are dropped at the beginning of a reply's text; longer ones come first."""

    @property
    def literals(self) -> str:
        """All text between the parts."""
        calls = self.calls.literals if self.calls else ""
        return "".join([*(self.reasoning or ()), calls, *self.headers])


_HEADER = "<|start|>assistant"
_CALL = "<|channel|>commentary to=functions."
HARMONY = ReplyFormat(
    CallFormat(_CALL, " <|constrain|>json<|message|>", f"<|call|>{_HEADER}{_CALL}", "<|call|>"),
    reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    headers=(
        *(f"{_HEADER}<|channel|>{name}<|message|>" for name in ("commentary", "final")),
        *(f"<|channel|>{name}<|message|>" for name in ("commentary", "final")),
        _HEADER,
    ),
)
"""The format of gpt-oss, whose template writes calls differently from the model."""
