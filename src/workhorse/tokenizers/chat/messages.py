"""The input of a chat template: messages, tools, documents and variables, as plain data only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_TEXT

ChatMessage = Mapping[str, Any]
"""A `role`, its `content`, and anything else that the template reads."""
MAX_DEPTH = 64
"""How deeply lists and mappings may be nested."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys under which templates look for a message's reasoning."""


@dataclass(frozen=True)
class Chat:
    """Everything that a rendering depends on except the template."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def checked(chat: Chat) -> Chat:
    """A copy of a chat made of strings, numbers, lists and mappings only.

    Raises:
        WorkhorseError: a message has no role or nothing but a role, a value is not plain data, or
            the chat has more than `MAX_TEXT` characters.
    """
    for number, message in enumerate(chat.messages):
        _check_message(number, message)
    size = [0]
    parts = (chat.messages, chat.tools, chat.documents, dict(chat.variables))
    messages, tools, documents, variables = (_plain(part, size, 0) for part in parts)
    if size[0] > MAX_TEXT:
        raise WorkhorseError(
            f"the chat has {size[0]:,} characters; at most {MAX_TEXT:,} can be used"
        )
    return Chat(messages, tools, documents, variables)


def with_reasoning(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with their reasoning under each key that a template may read."""
    completed: list[dict[str, Any]] = []
    for message in messages:
        texts = [message[name] for name in _REASONING if message.get(name) is not None]
        extra = {"thinking": texts[0], **message, "reasoning_content": texts[0]} if texts else {}
        completed.append(extra or message)
    return completed


def in_parts(chat: Chat) -> Chat:
    """The chat with each content that is a string as a list of one part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def _check_message(number: int, message: Any) -> None:
    if not isinstance(message, Mapping) or "role" not in message or len(message) == 1:
        has = sorted(map(str, message)) if isinstance(message, Mapping) else message
        raise WorkhorseError(f"message {number} has {has}; give each a 'role' and a 'content'")
    if not isinstance(message["role"], str):
        raise WorkhorseError(f"message {number}: role={message['role']!r} is not text; give text")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise WorkhorseError(
            f"message {number}: content={content!r} is not text; give text, or a list of parts"
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
                f"the chat holds a {type(value).__name__}; give text, numbers, lists and mappings"
            )


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise WorkhorseError(f"the chat has a key {key!r}, which is not text; give text")
