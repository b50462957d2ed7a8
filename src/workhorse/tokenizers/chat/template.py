"""A chat as token ids, where nothing that somebody typed becomes a control token.

A template is jinja source, as models bring it. To tell its control tokens from the same characters
in a message, it is rendered with stand-ins for what was typed; what are control tokens then, the
template wrote. What was typed is put back, and the whole is encoded as one text, the template's
control tokens spelled as nobody can type them.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_SOURCE
from workhorse.tokenizers.chat.messages import Message, checked, with_reasoning
from workhorse.tokenizers.chat.process import RENDERER
from workhorse.tokenizers.chat.stand_ins import Chat, StandIns
from workhorse.tokenizers.tokenizer import Tokenizer

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{% if message.role not in ['system', 'user', 'assistant'] %}
{{ raise_exception('role must be system, user or assistant, not ' ~ message.role) }}
{% endif %}
{{ '<|' ~ message.role ~ '|>' }}{{ message.content }}{{ '<|end|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Each turn begins with its role's token and ends with `<|end|>`."""

Messages = Sequence[Message]
_TAG = re.compile(r"[<\[{(|\uff5c].+[>\]})|\uff5c]", re.DOTALL)
"""What looks like a control token: `<think>`, `[TOOL_CALLS]`; not a word, a digit or spaces."""


class ChatTemplate:
    """How messages become one text, and safely token ids.

    Args:
        source: jinja source. It sees `messages`, `tools`, `documents`, `add_generation_prompt`, and
            the names of special tokens.
        names: the special tokens that it may know, such as `bos_token`.

    Raises:
        WorkhorseError: no jinja, or more of it than can be read.
    """

    def __init__(
        self, source: str = DEFAULT_TEMPLATE, *, names: Mapping[str, str] | None = None
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise WorkhorseError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are read"
            )
        self.source = source
        self._names = dict(names or {})
        self._literals = RENDERER.ask(source)

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "default") -> "ChatTemplate":
        """The tokenizer's own template, or the one for every tokenizer that has none.

        Raises:
            WorkhorseError: it has templates, and none of that name.
        """
        known = tokenizer.chat_templates or {"default": DEFAULT_TEMPLATE}
        if name not in known:
            raise WorkhorseError(f"no chat template {name!r}; there are: {', '.join(known)}")
        names = {f"{role}_token": token for role, token in tokenizer.roles.items()}
        return cls(known[name], names=names)

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat, to look at. To feed a model, use `encode`.

        Args:
            messages: each with a `role`, its `content` (a text, or a list of parts such as
                `{"type": "text", "text": ...}`) and what else the template knows (`tool_calls`).
            add_generation_prompt: end with the beginning of the assistant's next turn.
            tools: JSON schemas of the functions that the assistant may call.
            documents: texts that it may draw on.
            variables: what else the template knows, such as `enable_thinking`.

        Raises:
            WorkhorseError: other messages, a template that refuses them or exceeds its limits.
        """
        return self._render(_chat(messages, tools, documents, variables), add_generation_prompt)

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
        """The ids of a chat: the template's control tokens as such, all the rest as typed text.

        Control tokens are the tokenizer's special tokens, and those that it finds whole in any text
        (`<think>`) and that the template writes; the assistant may write the latter too.

        Args:
            tokenizer: the model's.
            messages: see `render`.
            add_generation_prompt: see `render`.
            tools: see `render`.
            documents: see `render`.
            allow_special: let the names of special tokens in messages become those tokens. Never
                for what somebody else typed.
            variables: see `render`.

        Raises:
            WorkhorseError: as `render`; and if the template takes messages apart so that its own
                special tokens cannot be told from theirs.
        """
        chat = _chat(messages, tools, documents, variables)
        if allow_special:
            text = self._render(chat, add_generation_prompt)
            return tokenizer.encode(text, allow_special=True)
        for message in messages:
            if any(name in message["role"] for name in tokenizer.special_tokens):
                raise WorkhorseError(f"role {message['role']!r} holds a special token; name a role")
        encoder = tokenizer.control_encoder(self._written_tokens(tokenizer))
        now = datetime.now()
        typed = StandIns(chat, encoder, tokenizer.special_tokens)
        marked = self._render(typed.without_contents, add_generation_prompt, now)
        plain = self._render(typed.without_names, add_generation_prompt, now)
        return encoder.encode(typed.put_back(marked, plain))

    def _written_tokens(self, tokenizer: Tokenizer) -> frozenset[str]:
        """The tokens, no special ones, that the template writes to give a chat its form."""
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
        return RENDERER.ask(self.source, variables, (now or datetime.now()).isoformat())


def _chat(messages: Messages, tools: Any, documents: Any, variables: Mapping[str, Any]) -> Chat:
    return checked(Chat(list(messages), tools, documents, dict(variables)))
