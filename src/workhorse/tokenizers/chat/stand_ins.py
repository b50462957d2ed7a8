"""Stand-ins for what was typed, so that what a template writes can be told from it.

A chat is rendered twice. Once without the contents of its messages: what names of control tokens
there are then, the template wrote. And once with the contents, but without such names in them, for
templates that look into contents. Where both renderings agree, the first one counts; else the
second, and it is refused if it holds other special tokens than the first.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.messages import Chat
from workhorse.tokenizers.control import ControlEncoder

_CODES = range(0xF0000, 0xFFFFE)
_PRIVATE = re.compile(f"[{chr(_CODES[0])}-{chr(_CODES[-1])}]")
"""Characters of a plane that Unicode leaves to private use."""

Change = Callable[[str, bool, bool], str]
"""Of a text, whether the assistant said it, and whether it is the content of a message."""


class StandIns:
    """A chat with stand-ins, and what they stand for.

    Args:
        chat: plain data.
        encoder: for the text that `put_back` gives.
        special: the special tokens. The encoder's other control tokens are the assistant's to
            write, nobody else's.
    """

    def __init__(self, chat: Chat, encoder: ControlEncoder, special: Collection[str]) -> None:
        self._encoder = encoder
        self._unused = _unused_characters(chat)
        self._special = re.compile(_any_of(special))
        self._control = re.compile(_any_of(encoder.names))
        self._any = re.compile(f"{_PRIVATE.pattern}|{self._control.pattern}")
        self._names: dict[str, str] = {}
        self._contents: dict[str, tuple[str, str]] = {}
        """Contents, first as in `without_names`, then as they are put back."""
        self.without_names = _changed(chat, self._without_names)
        """The chat, the names of control tokens replaced."""
        self.without_contents = _changed(self.without_names, self._without_content)
        """The chat, its contents replaced too."""

    def put_back(self, marked: str, plain: str) -> str:
        """The chat as a text for the encoder.

        Args:
            marked: the rendering of `without_contents`.
            plain: the rendering of `without_names`.

        Raises:
            WorkhorseError: the template took contents apart, and a special token came of it.
        """
        if _PRIVATE.sub(self._content, marked) != plain:
            self._check_same_tokens(marked, plain)
            marked = plain
        return self._any.sub(self._spelled, marked)

    def _without_names(self, text: str, is_assistant: bool, _: bool) -> str:
        names = self._special if is_assistant else self._control
        return names.sub(self._name, text)

    def _name(self, match: re.Match[str]) -> str:
        stand_in = self._stand_in()
        self._names[stand_in] = match[0]
        return stand_in

    def _without_content(self, text: str, is_assistant: bool, is_content: bool) -> str:
        """A stand-in; white space round a content stays outside, so that it can be trimmed."""
        core = text.strip()
        if not (core and is_content):
            return text
        pattern = self._any if is_assistant else _PRIVATE
        stand_in = self._stand_in()
        self._contents[stand_in] = (core, pattern.sub(self._spelled, core))
        return text.replace(core, stand_in, 1)

    def _stand_in(self) -> str:
        try:
            return next(self._unused)
        except StopIteration:
            raise WorkhorseError(
                "the chat holds too many messages or special tokens; take some out"
            ) from None

    def _content(self, match: re.Match[str]) -> str:
        return self._contents.get(match[0], (match[0],))[0]

    def _spelled(self, match: re.Match[str]) -> str:
        """What stands for a stand-in, or for the name of a control token, in the end."""
        found = match[0]
        if found in self._contents:
            return self._contents[found][1]
        if found in self._names:
            return self._names[found]
        return found if _PRIVATE.fullmatch(found) else self._encoder.mark(found)

    def _check_same_tokens(self, marked: str, plain: str) -> None:
        """Refuse a text in which contents, taken apart, have become special tokens."""
        ours, all_of_them = (self._special.findall(text) for text in (marked, plain))
        if ours != all_of_them:
            extra = next((name for name in all_of_them if name not in ours), all_of_them[-1:])
            raise WorkhorseError(
                f"this chat template takes messages apart, and {extra!r} came of it; take it out "
                "of the messages"
            )


def _changed(chat: Chat, change: Change) -> Chat:
    """A chat whose texts are changed, all but the roles."""
    messages = [
        {
            key: value
            if key == "role"
            else _each(value, change, message["role"] == "assistant", key == "content")
            for key, value in message.items()
        }
        for message in chat.messages
    ]
    rest = (_each(part, change) for part in (chat.tools, chat.documents, chat.variables))
    return Chat(messages, *rest)


def _each(value: Any, change: Change, is_assistant: bool = False, is_content: bool = False) -> Any:
    match value:
        case str():
            return change(value, is_assistant, is_content)
        case list():
            return [_each(item, change, is_assistant, is_content) for item in value]
        case dict():  # a part of a content has its text as "text"
            return {
                key: _each(item, change, is_assistant, is_content and key == "text")
                for key, item in value.items()
            }
        case _:
            return value


def _any_of(names: Iterable[str]) -> str:
    """A pattern for any of the names, the longest where several begin at one place."""
    longest_first = sorted(names, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _unused_characters(chat: Chat) -> Iterator[str]:
    """Characters without a meaning that occur nowhere in a chat; one cannot be cut in two."""
    everything = (chat.messages, chat.tools, chat.documents, chat.variables)
    used = set(_PRIVATE.findall(json.dumps(everything, ensure_ascii=False)))
    return (character for character in map(chr, _CODES) if character not in used)
