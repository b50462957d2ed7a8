"""Checks the input of a chat template and replaces typed text by placeholders.

A placeholder is a private-use character. A chat is rendered twice:

1. In the first rendering, placeholders replace the contents of messages. In all other strings,
   including keys of mappings, they replace the names of control tokens and the characters that
   begin or end such a name. If the whole string is a part of a name (`tool_call`), a placeholder
   replaces it, but in comparisons and look-ups the template still finds it equal to the string.
   So every control token in the result was written by the template.
2. In the second rendering, placeholders replace only the names of control tokens. So the result is
   also correct for templates that test or change the contents of messages.

The first result is used if it is equal to the second after the contents are inserted. Otherwise the
second is used. Then it is an error if the results have different special tokens. It is also an
error if the second has other control tokens than a third rendering, in which placeholders replace
the same as in the first, except for the contents.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_TEXT
from workhorse.tokenizers.control import ControlEncoder

ChatMessage = Mapping[str, Any]
"""A chat message: its `role`, `content`, and any other keys that the template reads."""
MAX_DEPTH = 64
"""Maximum nesting depth of lists and mappings."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates look for the reasoning of a message."""


@dataclass(frozen=True)
class Chat:
    """The input of a chat template."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    equals: Mapping[str, str] = field(default_factory=dict)
    """Placeholders for whole strings, and the string to which the template finds each equal."""


def checked(chat: Chat) -> Chat:
    """Copy a chat into plain data: strings, numbers, lists and mappings.

    Raises:
        WorkhorseError: a message has no role or only a role, a value is not plain data, or the chat
            has more than `MAX_TEXT` characters.
    """
    for number, message in enumerate(chat.messages):
        _check_message(number, message)
    size = [0]
    parts = (chat.messages, chat.tools, chat.documents, dict(chat.variables))
    messages, tools, documents, variables = (_plain(part, size, 0) for part in parts)
    if size[0] > MAX_TEXT:
        raise WorkhorseError(
            f"the chat has {size[0]:,} characters, above the limit of {MAX_TEXT:,}; shorten it"
        )
    # As in transformers: templates treat a missing key better than None, which they would print.
    present = [
        {key: one for key, one in message.items() if one is not None} for message in messages
    ]
    return Chat(present, tools, documents, variables)


def with_reasoning(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy the reasoning of each message to all keys that a template may use for it."""
    completed: list[dict[str, Any]] = []
    for message in messages:
        texts = [message[name] for name in REASONING if message.get(name) is not None]
        extra = {"thinking": texts[0], **message, "reasoning_content": texts[0]} if texts else {}
        completed.append(extra or message)
    return completed


def in_parts(chat: Chat) -> Chat:
    """Replace each content that is a string by a list with one part of type `text`."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def functions_of(message: ChatMessage) -> tuple[str, ...]:
    """Return the names of the functions that a message calls; none if a call is malformed."""
    calls = message.get("tool_calls") or ()
    try:
        names = tuple(call.get("function", call)["name"] for call in calls)
    except (AttributeError, KeyError, TypeError):
        return ()
    return names if all(isinstance(name, str) and name for name in names) else ()


def with_functions(message: ChatMessage, change: Callable[[int, Any], Any]) -> ChatMessage:
    """Return a message with the functions of its calls changed: `(index, function) -> function`."""
    if not functions_of(message):
        return message
    calls = [
        {**call, "function": change(index, call["function"])}
        if "function" in call
        else change(index, call)
        for index, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def _check_message(number: int, message: Any) -> None:
    if not isinstance(message, Mapping) or "role" not in message or len(message) == 1:
        has = sorted(map(str, message)) if isinstance(message, Mapping) else message
        raise WorkhorseError(f"message {number} has {has}; it needs a 'role' and a 'content'")
    if not isinstance(message["role"], str):
        raise WorkhorseError(
            f"message {number}: role={message['role']!r} is not a string; pass one"
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise WorkhorseError(
            f"message {number}: content={content!r} is not a string; pass one, or a list of parts"
        )


def _plain(value: Any, size: list[int], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise WorkhorseError(f"the chat is nested more than {MAX_DEPTH} levels deep; flatten it")
    size[0] += 1 + (len(value) if isinstance(value, str) else 0)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {_key(key): _plain(item, size, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, size, depth + 1) for item in value]
        case _:
            raise WorkhorseError(
                f"the chat contains a value of type {type(value).__name__}; use strings, numbers, "
                "lists and mappings"
            )


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise WorkhorseError(f"the chat has a key {key!r}, which is not a string; use strings as keys")


_CODES = range(0xF0000, 0xFFFFE)
_PRIVATE = re.compile(f"[{chr(_CODES[0])}-{chr(_CODES[-1])}]")
"""Matches a private-use character that can be a placeholder."""

_ESCAPED = re.compile(r"\\U000f[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
"""Matches a private-use character as it is escaped by Python's `repr` or in ASCII JSON."""
_QUOTES = "\"'\\"
"""Quotes and backslash, which a template may escape."""

Change = Callable[[str, bool, bool], str]
"""Changes a string: `(string, is_assistant, is_content) -> new string`."""


class Placeholders:
    """A chat with placeholders, and the string that each placeholder replaces.

    Args:
        chat: the chat, as plain data.
        encoder: the encoder for the text that `put_back` returns.
        special: names of the special tokens. The encoder's other control tokens may also occur in
            the assistant's messages, but not in messages of other roles.
    """

    def __init__(self, chat: Chat, encoder: ControlEncoder, special: Collection[str]) -> None:
        self._encoder = encoder
        self._unused = _unused_characters(chat)
        self._special = re.compile(_any_of(special))
        self._control = re.compile(_any_of(encoder.names))
        self._any = re.compile(f"{_PRIVATE.pattern}|{self._control.pattern}")
        edges = {edge for name in encoder.names for edge in (name[0], name[-1])}
        self._edges = re.compile(_any_of(e for e in edges if not e.isalnum() and e not in _QUOTES))
        plain_names = _any_of(name for name in encoder.names if name not in special)
        self._name_or_edge = re.compile(f"{plain_names}|{self._edges.pattern}")
        self._special_names, self._control_names = (
            "\0".join(names).lower() for names in (special, encoder.names)
        )
        """All names in one string: `_without_parts` searches it for parts of names."""
        self._equals: dict[str, str] = {}
        self._stand_in_of: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._contents: dict[str, tuple[str, str]] = {}
        """The content that each placeholder replaces, in two forms: as in `without_names`, and as
        in the result of `put_back`."""
        self.without_names = _changed(
            chat, self._without_names, lambda key: self._control.sub(self._name, key)
        )
        """The chat with the names of control tokens replaced."""
        self.without_contents = self._protected(self._without_content)
        """The chat with the contents of its messages also replaced."""

    def with_contents(self) -> Chat:
        """Return the chat `without_contents` with its contents as in the chat `without_names`."""
        return self._protected(
            lambda text, is_assistant, is_content: (
                text if is_content else self._without_parts(text, is_assistant)
            )
        )

    def _protected(self, change: Change) -> Chat:
        """Return the changed chat `without_names`, with its `equals`.

        Keys of messages are never replaced as a whole, because our own code reads some of them.
        """
        chat = _changed(
            self.without_names, change, lambda key: self._without_edges(key, is_assistant=False)
        )
        return replace(chat, equals=dict(self._equals))

    def missing(self, marked: str) -> list[int]:
        """Return the indices of messages with content that the template omitted.

        Assistant messages that call tools are not returned, since templates may omit their content.

        Args:
            marked: the template's output for the chat `without_contents`.
        """
        found = {*_PRIVATE.findall(_ESCAPED.sub(self._unescaped, marked))}
        return [
            index
            for index, message in enumerate(self.without_contents.messages)
            if not (message["role"] == "assistant" and message.get("tool_calls"))
            and self._contents_in(message.get("content")) - found
        ]

    def _contents_in(self, content: Any) -> set[str]:
        text = json.dumps(content, ensure_ascii=False)
        return {*_PRIVATE.findall(text)} & self._contents.keys()

    def put_back(self, marked: str, plain: str, rendered: Callable[[Chat], str]) -> str:
        """Replace the placeholders in the rendered chat and mark control tokens for the encoder.

        Args:
            marked: the template's output for the chat `without_contents`.
            plain: the template's output for the chat `without_names`.
            rendered: returns the template's output for a chat.

        Raises:
            WorkhorseError: the template cut or joined strings, and the result contains a new
                control token.
        """
        marked, plain = (_ESCAPED.sub(self._unescaped, text) for text in (marked, plain))
        if _PRIVATE.sub(self._content, marked) != plain:
            with_contents = _ESCAPED.sub(self._unescaped, rendered(self.with_contents()))
            _check_same_tokens(self._special, marked, plain)
            _check_same_tokens(self._control, with_contents, plain)
            marked = plain
        return self._any.sub(self._spelled, marked)

    def _without_names(self, text: str, is_assistant: bool, _: bool) -> str:
        names = self._special if is_assistant else self._control
        return names.sub(self._name, text)

    def _name(self, match: re.Match[str]) -> str:
        """Return the placeholder for a matched name.

        Equal names get the same placeholder, so that a template can still compare strings.
        """
        return self._same_stand_in(match[0])

    def _same_stand_in(self, text: str) -> str:
        if text not in self._stand_in_of:
            self._stand_in_of[text] = self._stand_in()
            self._names[self._stand_in_of[text]] = text
        return self._stand_in_of[text]

    def _without_content(self, text: str, is_assistant: bool, is_content: bool) -> str:
        """Replace a content by a placeholder. White space at its ends is kept.

        In strings that are not contents, only parts of control tokens are replaced.
        """
        if not is_content:
            return self._without_parts(text, is_assistant)
        core = text.strip()
        if not core:
            return text
        pattern = self._any if is_assistant else _PRIVATE
        stand_in = self._stand_in()
        self._contents[stand_in] = (core, pattern.sub(self._spelled, core))
        return text.replace(core, stand_in, 1)

    def _without_parts(self, text: str, is_assistant: bool) -> str:
        """Replace what can be a part of a control token: the string, or characters of it.

        The template can then not produce a control token by joining strings or changing case.
        """
        core = text.strip()
        names = self._special_names if is_assistant else self._control_names
        if not core or core.lower() not in names or _PRIVATE.search(core):
            return self._without_edges(text, is_assistant)
        stand_in = self._same_stand_in(core)
        self._equals[stand_in] = core
        return text.replace(core, stand_in, 1)

    def _without_edges(self, text: str, is_assistant: bool) -> str:
        """Replace the characters that begin or end a control token by placeholders."""
        if not is_assistant:
            return self._edges.sub(self._name, text)
        return self._name_or_edge.sub(
            lambda match: match[0] if len(match[0]) > 1 else self._name(match), text
        )

    def _stand_in(self) -> str:
        try:
            return next(self._unused)
        except StopIteration:
            raise WorkhorseError(
                "the chat has too many messages or special tokens; remove some"
            ) from None

    def _content(self, match: re.Match[str]) -> str:
        """Return the string that a placeholder stands for in the chat `without_names`."""
        token = match[0]
        if token in self._contents:
            return self._contents[token][0]
        name = self._names.get(token, token)
        return token if self._control.fullmatch(name) else name

    def _unescaped(self, match: re.Match[str]) -> str:
        character = _character(match[0])
        return character if character in self._names or character in self._contents else match[0]

    def _spelled(self, match: re.Match[str]) -> str:
        """Return the final string for a placeholder or for the name of a control token."""
        token = match[0]
        if token in self._contents:
            return self._contents[token][1]
        if token in self._names:
            return self._names[token]
        return token if _PRIVATE.fullmatch(token) else self._encoder.mark(token)


def _check_same_tokens(names: re.Pattern[str], marked: str, plain: str) -> None:
    """Check that cutting or joining strings did not produce control tokens."""
    ours, all_of_them = (names.findall(text) for text in (marked, plain))
    if ours != all_of_them:
        extra = [*(Counter(all_of_them) - Counter(ours)), *all_of_them, *ours][0]
        raise WorkhorseError(
            f"the chat template splits or joins strings of the chat, which produced the control "
            f"token {extra!r}; remove its characters from the chat"
        )


def _changed(chat: Chat, change: Change, change_key: Callable[[str], str]) -> Chat:
    """Return a chat with all strings changed, except the roles and the names of variables."""
    messages = [
        {
            change_key(key): value
            if key == "role"
            else _each(value, change, message["role"] == "assistant", key == "content")
            for key, value in message.items()
        }
        for message in chat.messages
    ]
    variables = {name: _each(value, change) for name, value in chat.variables.items()}
    return Chat(messages, _each(chat.tools, change), _each(chat.documents, change), variables)


def _each(value: Any, change: Change, is_assistant: bool = False, is_content: bool = False) -> Any:
    match value:
        case str():
            return change(value, is_assistant, is_content)
        case list():
            return [_each(item, change, is_assistant, is_content) for item in value]
        case dict():  # a part of a content has its text under "text"
            return {
                change(key, False, False): _each(
                    item, change, is_assistant, is_content and key == "text"
                )
                for key, item in value.items()
            }
        case _:
            return value


def _any_of(names: Iterable[str]) -> str:
    """Return a pattern that matches any of the names, the longest first."""
    longest_first = sorted(names, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _unused_characters(chat: Chat) -> Iterator[str]:
    """Return placeholders: private-use characters that are not in the chat.

    A template cannot split a placeholder, because it is a single character.
    """
    everything = (chat.messages, chat.tools, chat.documents, chat.variables)
    text = json.dumps(everything, ensure_ascii=False).replace(r"\\", "\\")  # undo the JSON escape
    used = {*_PRIVATE.findall(text), *map(_character, _ESCAPED.findall(text))}
    return (character for character in map(chr, _CODES) if character not in used)


def _character(escaped: str) -> str:
    """Return the character for an escape sequence that matches `_ESCAPED`."""
    return json.loads(f'"{escaped}"') if escaped[1] == "u" else chr(int(escaped[2:], 16))
