"""Encodes chats as token ids, so that typed text never becomes a control token.

A template is jinja source that comes with a model. Its control tokens must be distinguished from
the same characters in a message. So the template is rendered with placeholders for the typed text,
and all control tokens in the result come from the template. Then random markers replace these
control tokens, typed text replaces the placeholders, and the result is encoded as one string.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from inspect import signature
from typing import Any

from workhorse.errors import WorkhorseError, shown
from workhorse.tokenizers.chat.limits import MAX_SOURCE
from workhorse.tokenizers.chat.messages import (
    Chat,
    ChatMessage,
    Placeholders,
    checked,
    functions_of,
    in_parts,
    with_reasoning,
)
from workhorse.tokenizers.chat.process import RENDERER
from workhorse.tokenizers.config import CHAT_TOKENS
from workhorse.tokenizers.control import ControlEncoder
from workhorse.tokenizers.tokenizer import Tokenizer

_TURNS = """
{% if tools %}{{ raise_exception('this chat template has no format for tools') }}{% endif %}
{% for message in messages %}
{% if message.role not in roles %}
{{ raise_exception('role must be ' ~ roles[:-1] | join(', ') ~ ' or ' ~ roles[-1] ~ ', not '
   ~ message.role) }}
{% endif %}
{% if message.tool_calls %}
{{ raise_exception('this chat template has no format for tool_calls; write them as content') }}
{% endif %}
{{ '<|' ~ message.role ~ '|>' }}{{ message.content }}{{ '<|end|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def default_template(*more_roles: str) -> str:
    """Return the template for tokenizers without one: role token, content and `<|end|>` per turn.

    Its roles are system, user, assistant and `more_roles`.
    """
    return f"{{% set roles = {['system', 'user', 'assistant', *more_roles]} %}}{_TURNS}"


DEFAULT_TEMPLATE = default_template()
OUR_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
"""Variables that are set for every template."""
TOOL_USE = "tool_use"
"""Name of the template for chats with tools."""

Messages = Sequence[ChatMessage]
_TAG = re.compile(r"[<\[{(|\uff5c].+[>\]})|\uff5c]", re.DOTALL)
"""Matches names that look like control tokens: `<think>`, `[TOOL_CALLS]`; not plain words."""
_IN_A_WORD = re.compile(r"[\w\s.'\"\\-]")
"""Matches characters that are allowed in roles even if a special token begins or ends with them."""
_PARTS = re.compile(r"""\.text\b|['"]text['"]""")
"""Matches the expressions by which templates read the text of a content part."""


class ChatTemplate:
    """Renders messages as text, and encodes them safely as token ids.

    Args:
        source: jinja source. It can read `messages`, `tools`, `documents`, `add_generation_prompt`
            and the special tokens in `names`.
        names: special tokens by variable name, such as `bos_token`.
        with_tools: the template for chats with tools. It is used if `tools` is not None.

    Attributes:
        variables: names of the other variables that the template reads; see `render`.

    Raises:
        WorkhorseError: the source is not valid jinja or too long, or `names` is not a mapping.
    """

    def __init__(
        self,
        source: str = DEFAULT_TEMPLATE,
        *,
        names: Mapping[str, str] | None = None,
        with_tools: "ChatTemplate | None" = None,
    ) -> None:
        if not isinstance(source, str):
            raise WorkhorseError(f"source={shown(source)} is not a string; pass jinja source")
        if not isinstance(names, Mapping | None):
            raise WorkhorseError(
                f"names={shown(names)} is not a mapping; map variable names to special tokens"
            )
        if len(source) > MAX_SOURCE:
            raise WorkhorseError(
                f"the chat template has {len(source):,} characters, above the limit of "
                f"{MAX_SOURCE:,}; shorten it"
            )
        self.source = source
        self.with_tools = with_tools
        self._names = dict(names or {})
        literals, variables = json.loads(RENDERER.ask(source))
        self._literals = "\0".join(literals)
        ours = {*OUR_VARIABLES, *_parameters(), *self._names}
        self.variables = frozenset(variables) - ours
        self._knows_parts = _PARTS.search(source) is not None

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str | None = None) -> "ChatTemplate":
        """Return the tokenizer's template, or `DEFAULT_TEMPLATE` if it has none.

        Args:
            tokenizer: the model's tokenizer.
            name: name of the template. If None, `default` is used, but `tool_use` for chats with
                tools, if it exists. This is the rule of transformers.

        Raises:
            WorkhorseError: the tokenizer has no template with this name.
        """
        known = tokenizer.chat_templates or {"default": DEFAULT_TEMPLATE}
        names = {f"{role}_token": token for role, token in tokenizer.roles.items()}
        with_tools = None
        if name is None and TOOL_USE in known:
            with_tools = cls(known[TOOL_USE], names=names)
        name = "default" if name is None else name
        if name not in known:
            raise WorkhorseError(
                f"chat template {name!r} does not exist; choose one of: {', '.join(known)}"
            )
        return cls(known[name], names=names, with_tools=with_tools)

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a chat as text to read. Use `encode` for the input of a model.

        Args:
            messages: messages, each with a `role`, its `content` (a string, or a list of parts such
                as `{"type": "text", "text": ...}`) and any other keys that the template reads
                (`tool_calls`). If a template reads only parts, a string is passed as one part.
            add_generation_prompt: True to end with the beginning of the assistant's next turn.
            tools: JSON schemas of the functions that the assistant may call.
            documents: documents that the assistant may use.
            variables: other variables that the template reads, such as `enable_thinking`.

        Raises:
            WorkhorseError: the messages are malformed, or the template raises an error or exceeds a
                limit.
        """
        chat = _chat(messages, tools, documents, variables)
        now = datetime.now()
        template = self.for_tools(tools)
        try:
            text = template._render(chat, add_generation_prompt, now)
        except WorkhorseError:
            if not template._knows_parts:
                raise
            return template._render(in_parts(chat), add_generation_prompt, now)
        contents = [c.strip() for m in chat.messages if isinstance(c := m.get("content"), str)]
        if template._knows_parts and any(content not in text for content in contents):
            with suppress(WorkhorseError):
                other = template._render(in_parts(chat), add_generation_prompt, now)
                text = other if all(content in other for content in contents) else text
        return text

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        allow_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Encode a chat: control tokens from the template, everything else as typed text.

        Control tokens are the tokenizer's special tokens and the other added tokens that the
        template writes, such as `<think>`. The latter may also occur in the assistant's messages.

        Args:
            tokenizer: the model's tokenizer.
            messages: see `render`.
            add_generation_prompt: see `render`.
            tools: see `render`.
            documents: see `render`.
            allow_special: True to encode the names of special tokens in messages as those tokens.
                Never use it for untrusted text.
            variables: see `render`.

        Raises:
            WorkhorseError: the messages are malformed; the template raises an error or exceeds a
                limit; a message's content or a tool call is not in the rendered text; or the
                template splits or joins strings, so that its control tokens cannot be
                distinguished from typed text.
        """
        if not allow_special:
            encoder, spelled = self.spelling(
                tokenizer, tools=tools, documents=documents, **variables
            )
            text = spelled(messages, add_generation_prompt)
            # Only one call, since each takes another rendering: templates treat all in one way.
            check_calls(messages, text, lambda one: spelled(one, add_generation_prompt), most=1)
            return encoder.encode(text)
        template, now = self.for_tools(tools), datetime.now()
        encoder = tokenizer.control_encoder(template._written_tokens(tokenizer))
        chat = _chat(messages, tools, documents, variables)
        chat, _, _ = template._marked(chat, add_generation_prompt, now, tokenizer, encoder)
        text = template._render(chat, add_generation_prompt, now)
        return tokenizer.encode(text, allow_special=True)

    def spelling(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[ControlEncoder, Callable[[Messages, bool], str]]:
        """Return an encoder, and a function from messages to the string that `encode` encodes.

        The function's second argument is `add_generation_prompt`. Control tokens are spelled in the
        same way in all strings, and the current time is the same in all.

        Args:
            tokenizer: the model's tokenizer.
            tools: see `render`.
            documents: see `render`.
            variables: see `render`.
        """
        template, now = self.for_tools(tools), datetime.now()
        encoder = tokenizer.control_encoder(template._written_tokens(tokenizer))

        def spelled(messages: Messages, add_generation_prompt: bool) -> str:
            chat = _chat(messages, tools, documents, variables)
            _check_roles(chat, [*encoder.names])
            _, typed, text = template._marked(chat, add_generation_prompt, now, tokenizer, encoder)

            def rendered(chat: Chat) -> str:
                return template._render(chat, add_generation_prompt, now)

            return typed.put_back(text, rendered(typed.without_names), rendered)

        return encoder, spelled

    @cached_property
    def reads_json_arguments(self) -> bool:
        """True if the template writes the arguments of a call only if they are a JSON string."""
        written = ["", ""]
        for index, given in enumerate(({"k": "v"}, '{"k": "v"}')):
            function = {"name": "f", "arguments": given}
            call = {"id": "call00001", "type": "function", "function": function}
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(WorkhorseError):
                written[index] = self.render([{"role": "user", "content": "a"}, reply], False)
        as_object, as_json = written
        return '{"k": "v"}' in as_json and (not as_object or "{'k': 'v'}" in as_object)

    def for_tools(self, tools: object) -> "ChatTemplate":
        """Return the template for chats with these tools, or without tools if they are None."""
        return self if tools is None or self.with_tools is None else self.with_tools

    def _marked(
        self,
        chat: Chat,
        add_generation_prompt: bool,
        now: datetime,
        tokenizer: Tokenizer,
        encoder: ControlEncoder,
    ) -> tuple[Chat, Placeholders, str]:
        """Render a chat with placeholders; its contents as parts if the template needs that."""

        def marked(chat: Chat) -> tuple[Chat, Placeholders, str]:
            typed = Placeholders(chat, encoder, tokenizer.special_tokens)
            text = self._render(typed.without_contents, add_generation_prompt, now)
            _check_whole(chat, typed.missing(text))
            return chat, typed, text

        try:
            return marked(chat)
        except WorkhorseError as error:
            if not self._knows_parts:
                raise
            try:
                return marked(in_parts(chat))
            except WorkhorseError:
                raise error from None

    def _written_tokens(self, tokenizer: Tokenizer) -> frozenset[str]:
        """Return the added tokens that the template writes as control tokens, such as `<think>`."""
        return frozenset(
            name
            for name in tokenizer.plain_added_tokens
            if name in self._literals and _TAG.fullmatch(name)
        )

    def _render(self, chat: Chat, add_generation_prompt: bool, now: datetime | None = None) -> str:
        variables = {
            **self._names,
            **chat.variables,
            "messages": with_reasoning(chat.messages),
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": add_generation_prompt,
        }
        when = (now or datetime.now()).isoformat()
        return RENDERER.ask(self.source, variables, when, chat.equals)


def _parameters() -> set[str]:
    """Return the names of parameters, which cannot also be names of other variables."""
    methods = (ChatTemplate.render, ChatTemplate.encode, ChatTemplate.spelling)
    return {name for method in methods for name in signature(method).parameters}


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer with a chat template: its own, or the default one if it has its tokens.

    Raises:
        WorkhorseError: the tokenizer has neither a template nor the tokens of the default one.
    """
    if tokenizer.chat_templates:
        return tokenizer
    missing = [name for name in CHAT_TOKENS if name not in tokenizer.special_tokens]
    if missing:
        raise WorkhorseError(
            "conversations need a chat template, but the tokenizer has none, nor the special "
            f"tokens {' '.join(missing)} of the default one; set tokenizer.chat=true"
        )
    more = ["tool"] if "<|tool|>" in tokenizer.special_tokens else []
    return Tokenizer(tokenizer.definition, tokenizer.roles, default_template(*more))


def _chat(messages: Messages, tools: Any, documents: Any, variables: Mapping[str, Any]) -> Chat:
    if not isinstance(messages, Sequence):
        raise WorkhorseError(
            f"messages={shown(messages)} is not a list; pass a list of messages with a 'role' and "
            "a 'content'"
        )
    return checked(Chat(list(messages), tools, documents, dict(variables)))


def _check_roles(chat: Chat, names: Collection[str]) -> None:
    """Raise an error for a role that could become a part of a control token.

    For example, templates may write `"<|" + role + "|>"`.
    """
    ends = {end for name in names for end in (name[0], name[-1]) if not _IN_A_WORD.match(end)}
    parts = [*ends, *(name.lower() for name in names)]
    for message in chat.messages:
        role = message["role"].lower()  # a template may change its case
        if any(part in role for part in parts):
            raise WorkhorseError(
                f"role {message['role']!r} contains a special token, or the first or last "
                "character of one; use a plain word"
            )


def check_calls(
    messages: Messages, text: str, render: Callable[[Messages], str], most: int | None = None
) -> None:
    """Raise an error if the text of messages is the same without one of their first `most` calls.

    `render` renders messages in the same way as `text`.
    """
    counts = [len(functions_of(message)) for message in messages]
    calls = [(number, index) for number, count in enumerate(counts) for index in range(count)]
    for number, index in calls[:most]:
        message, given = messages[number], messages[number]["tool_calls"]
        fewer = {**message, "tool_calls": [*given[:index], *given[index + 1 :]] or None}
        if is_rendered([*messages[:number], fewer, *messages[number + 1 :]], text, render):
            raise WorkhorseError(
                f"the chat template omits tool call {index} of message {number} (role "
                f"{message['role']!r}); write the call as content"
            )


def is_rendered(messages: Messages, text: str, render: Callable[[Messages], str]) -> bool:
    """Return True if the rendered text of messages is `text`."""
    with suppress(WorkhorseError):
        return render(messages) == text
    return False


def _check_whole(chat: Chat, missing: Sequence[int]) -> None:
    """Raise an error if the template did not render the content of a message."""
    if missing:
        message = chat.messages[missing[0]]
        remedy = "move its text to a message of another role"
        if isinstance(message["content"], list):
            remedy = "pass its content as one string"
        raise WorkhorseError(
            f"the chat template omits the content of message {missing[0]} (role "
            f"{message['role']!r}); {remedy}"
        )
