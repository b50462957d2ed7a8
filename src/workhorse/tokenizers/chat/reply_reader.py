"""Divides a reply, as it arrives, into text, reasoning and tool calls."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from workhorse.tokenizers.chat.reply_format import CallFormat, ReplyFormat, check_json

LONGEST_NAME = 64


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """The arguments as JSON."""
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9], compare=False)
    """Nine letters and digits, as some templates require."""


class Piece(NamedTuple):
    """A part of a reply."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


NOTHING = Piece("text")


class ReplyReader:
    """Divides a reply into pieces.

    White space around reasoning and before calls is dropped. A call is a piece when it is complete.
    Text that begins like calls but is not a call remains text.

    Args:
        format: how the model writes replies.
        tools: the schema of the parameters of each function; None: calls are not recognised.
        only_calls: True if the reply must consist of calls, so that other text is part of a call
            that was cut; it is dropped.
    """

    def __init__(
        self,
        format: ReplyFormat,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        only_calls: bool = False,
    ) -> None:
        self._only_calls = only_calls
        self._format = format
        self._calls: CallFormat | None = None if tools is None else format.calls
        self._tools = tools or {}
        self._held = ""
        self._state: Literal["start", "reasoning", "text", "first call", "next call"] = "start"
        self._strips = format.reasoning is not None
        """True if white space at the beginning of the held text is dropped."""
        self._has_text = False
        """True if text has been given."""
        self._searched = 0
        """The held text before this place has no end of tagged arguments."""
        if format.begins_in_reasoning:
            self._state = "reasoning"

    def read(self, text: str, *, ended: bool) -> list[Piece]:
        """Read more text, and return the pieces that are now certain.

        Args:
            text: the new text.
            ended: True if the reply ends with it.
        """
        self._held += text
        steps = {
            "start": self._start,
            "reasoning": self._reasoning,
            "text": self._text,
            "first call": self._first_call,
            "next call": self._next_call,
        }
        pieces: list[Piece] = []
        while (piece := steps[self._state](ended)) is not None:
            if piece.call or (piece.text and not (self._only_calls and piece.kind == "text")):
                pieces.append(piece)
        return pieces

    # Each of these methods returns the next piece, `NOTHING` if only the state has changed, and
    # None if more text is needed.

    def _start(self, ended: bool) -> Piece | None:
        self._held = self._held.lstrip() if self._strips else self._held
        begin = self._format.reasoning[0] if self._format.reasoning else ""
        if begin and begin.startswith(self._held) and not ended:
            return None
        if begin and self._held.startswith(begin):
            self._held = self._held[len(begin) :]
            self._state = "reasoning"
        else:
            self._state = "text"
        return NOTHING

    def _reasoning(self, ended: bool) -> Piece | None:
        assert self._format.reasoning is not None
        end = self._format.reasoning[1]
        if end not in self._held:
            return self._given("reasoning", end, ended)
        text, _, self._held = self._held.partition(end)
        piece = Piece("reasoning", text.strip() if self._strips else text.rstrip())
        self._state, self._strips = "text", True
        return piece

    def _text(self, ended: bool) -> Piece | None:
        headers = self._format.headers if self._strips else ()
        while headers:
            held = self._held.lstrip()
            if held and not ended and any(one != held and one.startswith(held) for one in headers):
                return None
            header = next((one for one in headers if held.startswith(one)), "")
            self._held = held.removeprefix(header)
            if not header:
                break
        marker = self._calls.marker if self._calls else ""
        at = self._held.find(marker) if marker else -1
        is_first = not self._has_text and not self._held[:at].strip()
        if self._calls and at >= 0 and (self._calls.is_tag or is_first):
            before = self._held[:at].rstrip()
            self._held, self._state = self._held[at:], "first call"
            return Piece("text", before.lstrip() if self._strips else before)
        return self._given("text", marker, ended)

    def _given(self, kind: Literal["text", "reasoning"], end: str, ended: bool) -> Piece | None:
        """Return the held text without white space and a beginning of `end` at its end."""
        text = self._held.lstrip() if self._strips else self._held
        given = text
        if end and not ended:
            given = text[: len(text) - _overlap(text, end)].rstrip()
        self._held = text[len(given) :]
        self._strips = self._strips and not given
        self._has_text = self._has_text or (kind == "text" and bool(given.strip()))
        return Piece(kind, given) if given else None

    def _first_call(self, ended: bool) -> Piece | None:
        assert self._calls is not None
        match = self._calls.patterns.begin.match(self._held)
        call = None if match is None else self._call(match, ended)
        if call is None and ended:  # not a call
            self._calls, self._state, self._strips = None, "text", False
            return NOTHING
        return call

    def _next_call(self, ended: bool) -> Piece | None:
        assert self._calls is not None
        between, end = self._calls.patterns.between, self._calls.patterns.end
        match = between.match(self._held) if between else None
        if match is not None:
            call = self._call(match, ended)
            if call is not None or not ended:
                return call
        held = _dense(self._held)
        match = end.match(self._held)
        if not ended and (_agree(_dense(self._calls.between), held) or match is None):
            longest = len(self._calls.literals) + LONGEST_NAME
            if len(held) <= longest:
                return None
        if match is not None:
            self._held = self._held[match.end() :]
        elif _dense(self._calls.end).startswith(held):
            self._held = ""  # the end is incomplete
        self._state, self._strips = "text", True
        return NOTHING

    def _call(self, match: re.Match[str], ended: bool) -> Piece | None:
        """Return the call after the match of its name; None if it is incomplete."""
        assert self._calls is not None
        if self._calls.tagged is not None:
            if not ended and not self._may_end():
                return None
            arguments, end = self._tagged(match["name"], match.end())
            if not self._ends(end, ended):
                return None
            text = json.dumps(arguments, ensure_ascii=False)
        else:
            try:
                arguments, end = json.JSONDecoder().raw_decode(self._held, match.end())
                check_json(arguments)
            except (ValueError, RecursionError):
                return None
            if not isinstance(arguments, dict):
                return None
            text = self._held[match.end() : end]
        self._held, self._state, self._searched = self._held[end:], "next call", 0
        return Piece("call", call=Call(match["name"], text))

    def _may_end(self) -> bool:
        """True if the held text since the last search has the end of tagged arguments."""
        assert self._calls is not None
        searched, self._searched = self._searched, len(self._held)
        return any(
            self._held.find(one, max(0, searched - len(one))) >= 0
            for one in self._calls.after_arguments
        )

    def _ends(self, end: int, ended: bool) -> bool:
        """True if the tagged arguments that end here are complete."""
        assert self._calls is not None
        rest = _dense(self._held[end:])
        if ended and _dense(self._calls.end).startswith(rest):
            return True
        patterns = self._calls.patterns
        after = [one for one in (patterns.between, patterns.end) if one is not None]
        return bool(rest) and any(one.match(self._held, end) for one in after)

    def _tagged(self, name: str, start: int) -> tuple[dict[str, Any], int]:
        """Read tagged arguments from `start` on, and return where they end."""
        assert self._calls is not None
        patterns, tags = self._calls.patterns, self._calls.tagged
        assert patterns.key is not None
        assert tags is not None
        arguments: dict[str, Any] = {}
        properties = self._tools.get(name, {}).get("properties", {})
        while (match := patterns.key.match(self._held, start)) is not None:
            schema = properties.get(match["key"])
            asked = isinstance(schema, dict) and schema.get("type") == "string"
            is_string = match["string"] is not None if tags.marks_strings else asked
            at = match.end()
            if not is_string:
                at = tags.end_of_nested(self._held, at)
            close = patterns.closes[0 if is_string else 1].search(self._held, at)
            if close is None:
                break
            value = self._held[match.end() : close.start()]
            arguments[match["key"]] = value if is_string else tags.value(value)
            start = close.end()
        if not arguments and not tags.first.endswith(tags.next):
            start += len(tags.first) if self._held.startswith(tags.first, start) else 0
        return arguments, start


def _dense(text: str) -> str:
    """Return a string without its white space."""
    return "".join(text.split())


def _agree(one: str, other: str) -> bool:
    """True if one of two strings begins with the other, and neither is empty."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _overlap(text: str, end: str) -> int:
    """Return the length of the longest end of `text` that begins `end`."""
    most = min(len(text), len(end) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(end[:n])), 0)
