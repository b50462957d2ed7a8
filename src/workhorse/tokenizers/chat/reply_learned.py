"""Learns the format of replies from the chat template.

A template writes the tool calls of earlier replies as the model was trained to write them. So a
reply with calls of known names and arguments is rendered, and the text around them is the format:
no list of model families is needed. The text around the reasoning is found in the same way. A
format that does not read the rendered replies back is not used.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os.path import commonprefix
from typing import Any, Literal

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.reply_format import HARMONY, IDS, CallFormat, ReplyFormat, Tagged
from workhorse.tokenizers.chat.reply_reader import ReplyReader
from workhorse.tokenizers.chat.template import ChatTemplate

NAMES = ("qzfone", "qzftwo")
STRINGS = {"qkaone": "qvaone", "qkbtwo": "qvbtwo"}
NUMBERS = {"qkcsix": 76001, "qkdten": 76002}
ARGUMENTS = STRINGS | NUMBERS
LONGEST_EXAMPLE = 4000
"""Maximum number of characters of a rendered reply with two calls."""
CONTENT, REASONING = "Qcontentq", "Qreasoningq"
_ASK = {"role": "user", "content": "q"}
_OPEN_TAG = re.compile(r"(<[^<>]*|\[[A-Z_/]*)\Z")
"""Matches the beginning of a tag at the end of a string."""
_TAG = re.compile(r"<[^<>]*>(?=[<\s]|\Z)|\[[^\[\]]*\]")
"""Matches a tag that no plain text follows."""
_KINDS: dict[str, Any] = {
    **{key: {"type": "string", "description": "a text"} for key in STRINGS},
    **{key: {"type": "integer", "description": "a number"} for key in NUMBERS},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a function",
            "parameters": {"type": "object", "properties": _KINDS, "required": [*STRINGS]},
        },
    }
    for name in NAMES
]


def reply_format(template: ChatTemplate) -> ReplyFormat:
    """Learn the format of replies from a template."""
    if "<|channel|>analysis<|message|>" in template.source:
        return HARMONY
    return ReplyFormat(_calls(template), _reasoning(template))


def after_prompt(format: ReplyFormat, template: ChatTemplate, /, **variables: Any) -> ReplyFormat:
    """Return the format of replies to prompts that may begin or end the reasoning.

    Args:
        format: the format of replies.
        template: the template.
        variables: other variables that the template reads.
    """
    if format.reasoning is None:
        return format
    begin, end = format.reasoning
    with suppress(WorkhorseError):
        before, prompt = (template.render([_ASK], add, **variables) for add in (False, True))
        last = [prompt.rfind(mark, len(before)) for mark in (begin, end)]
        if last[1] > last[0]:
            return replace(format, reasoning=None)
        return replace(format, begins_in_reasoning=last[0] >= 0)
    return format


def _render(template: ChatTemplate, reply: Mapping[str, Any]) -> str:
    return template.render([_ASK, {"role": "assistant", **reply}], False, tools=_TOOLS)


def _common(*texts: str) -> int:
    """Return the length of the common beginning of strings, without the beginning of a tag."""
    return len(_OPEN_TAG.sub("", commonprefix(texts)))  # noqa: RUF071 - strings, not paths


def _reasoning(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the text around the reasoning of a reply; None if there is none."""
    with suppress(WorkhorseError):
        plain = _render(template, {"content": CONTENT})
        text = _render(template, {"content": CONTENT, "reasoning_content": REASONING})
        before, found, after = text.partition(REASONING)
        end = after.partition(CONTENT)[0].strip()
        if found and CONTENT in after and end and len(text) <= LONGEST_EXAMPLE:
            begin = before[_common(plain, before) :].strip()
            if not begin:  # every reply begins with it
                begin = before[before.rstrip().rfind("<") :].strip()
            tag = _TAG.match(end)
            if begin:
                return begin, end if tag is None else tag[0]
    return ("<think>", "</think>") if "</think>" in template.source else None


def _calls(template: ChatTemplate) -> CallFormat | None:
    """Return the format of tool calls; None if the template does not write tools and calls."""
    with suppress(WorkhorseError):
        if NAMES[1] not in template.render([_ASK], tools=_TOOLS):
            return None
        plain = _render(template, {"content": CONTENT})
        for content in ("", None):
            for kind in ("mapping", "json"):
                with suppress(Exception):  # a template may write anything
                    return _Examples(template, plain, content, kind).format()
    return None


class _Examples:
    """Rendered replies with calls.

    `plain` is a rendered reply without calls.
    """

    def __init__(
        self,
        template: ChatTemplate,
        plain: str,
        content: str | None,
        kind: Literal["mapping", "json"],
    ) -> None:
        self._template = template
        self._content = content
        self._kind: Literal["mapping", "json"] = kind
        self._turn_end = plain[plain.index(CONTENT) + len(CONTENT) :]
        self._start = _common(plain, self._reply(ARGUMENTS))

    def _reply(self, *arguments: Mapping[str, Any]) -> str:
        """Render a reply that calls a function with each of the arguments."""
        calls = [
            {
                "id": id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(given) if self._kind == "json" else given,
                },
            }
            for id, name, given in zip(IDS, NAMES, arguments, strict=False)
        ]
        return _render(self._template, {"content": self._content, "tool_calls": calls})

    def _part(self, *arguments: Mapping[str, Any]) -> str:
        """Return the reply's part of a rendered reply, without the end of the turn."""
        part = self._reply(*arguments)[self._start :].removesuffix(self._turn_end)
        if len(part) > LONGEST_EXAMPLE or part.count(IDS[0]) > 1:
            raise ValueError("the example is too long, or has an id several times")
        return part

    def format(self) -> CallFormat:
        """Learn the format.

        Raises:
            ValueError: names and arguments are not found, or the format does not read them.
            WorkhorseError: the template cannot render calls.
        """
        text = self._part(ARGUMENTS)
        name = text.index(NAMES[0])
        after = name + len(NAMES[0])
        place = _json_in(text, after)
        tagged = None
        if place is not None:
            after_name, end = text[after : place[0]], text[place[1] :]
        else:
            one = self._part(dict([next(iter(STRINGS.items()))]))
            after_name, tagged, end = _tags(text[after:], one)
        between = ""
        with suppress(WorkhorseError, ValueError):
            between = self._between(self._part(ARGUMENTS, ARGUMENTS), tagged)
        begin = text[:name].lstrip()
        if not begin:
            raise ValueError("no text precedes the name")
        found = CallFormat(
            begin, after_name, between, end.rstrip(), tagged, self._kind, self._content
        )
        examples = [[ARGUMENTS], [{[*STRINGS][1]: [76001]}], [{}]]
        for arguments in [*examples, [ARGUMENTS, ARGUMENTS]] if between else examples:
            _check(found, self._part(*arguments), arguments)
        return found

    def _between(self, text: str, tagged: Tagged | None) -> str:
        """Return the text from the end of the first call's arguments to the second name."""
        if tagged is None:
            place = _json_in(text, text.index(NAMES[0]))
            start = len(text) if place is None else place[1]
        else:
            value = str([*NUMBERS.values()][-1])
            start = text.index(value) + len(value) + len(tagged.close[1])
        return text[start : text.index(NAMES[1], start)]


def _json_in(text: str, start: int) -> tuple[int, int] | None:
    """Return the place of the arguments as JSON after `start`; None if they are not there."""
    for brace in re.finditer(r"\{", text[start:]):
        with suppress(ValueError):
            at = start + brace.start()
            found, end = json.JSONDecoder().raw_decode(text, at)
            if found == ARGUMENTS:
                return at, end
    return None


def _tags(text: str, one: str) -> tuple[str, Tagged, str]:
    """Learn the tags of arguments.

    Args:
        text: a reply after the name of the function, with all arguments.
        one: a reply with only the first of the strings.

    Returns:
        The text between name and arguments, the tags, and the text after the arguments.
    """
    gaps: list[str] = []
    for part in (str(part) for pair in ARGUMENTS.items() for part in pair):
        gap, found, text = text.partition(part)
        if not found:
            raise ValueError(f"{part} is missing")
        gaps.append(gap)
    before, open_string, after_string, _, _, open_number, after_number, _ = gaps
    value = next(iter(STRINGS.values()))
    last_string = one[one.rindex(value) + len(value) :]
    close_string = after_string[: _common(after_string, last_string)]
    close_number = after_number[: _common(after_number, text)]
    more = after_number[len(close_number) :]
    first = more if before.endswith(more) else before
    tags = Tagged(first, more, (open_string, open_number), (close_string, close_number))
    return before.removesuffix(first), tags, text[len(close_number) :]


def _check(format: CallFormat, reply: str, arguments: list[dict[str, Any]]) -> None:
    """Check that a format reads a rendered reply."""
    pieces = ReplyReader(ReplyFormat(format), {}).read(reply, ended=True)
    found = [(one.call.name, json.loads(one.call.arguments)) for one in pieces if one.call]
    if found != [*zip(NAMES, arguments, strict=False)] or any(one.text.strip() for one in pieces):
        raise ValueError("the format does not read its own example")
