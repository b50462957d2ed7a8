"""A chat as token ids, where nothing that somebody typed becomes a control token.

A template is jinja source, as models bring it in `tokenizer_config.json`. To tell its control
tokens from the same characters in a message, it is rendered with stand-ins for the messages; what
are control tokens then, the template wrote. The messages are put back into the text between them,
and that is encoded like any typed text.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from jinja2 import Template, TemplateError

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat_sandbox import MAX_SOURCE, MAX_TEXT, ChatEnvironment
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

TEMPLATE_FAILURES = (
    TemplateError,
    SyntaxError,
    RecursionError,
    MemoryError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)
"""What code that a template was compiled to may raise: its author's mistakes, not ours."""

Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
    """How messages become one text, and safely token ids.

    Args:
        source: jinja source. It sees `messages`, `add_generation_prompt`, `bos_token`, `eos_token`.
        bos: the name of the bos token, or nothing.
        eos: the name of the eos token, or nothing.

    Raises:
        WorkhorseError: no jinja, or more than `MAX_SOURCE` characters of it.
    """

    def __init__(self, source: str = DEFAULT_TEMPLATE, *, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise WorkhorseError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are read"
            )
        self.source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        with _one_line():
            self._code = ChatEnvironment().compile(source)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The tokenizer's own template, or the default one."""
        roles = tokenizer.roles
        source = tokenizer.chat_template or DEFAULT_TEMPLATE
        return cls(source, bos=roles.get("bos", ""), eos=roles.get("eos", ""))

    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The text of a chat, to look at. To feed a model, use `encode`.

        Args:
            messages: each with `role` and `content`, texts both, and nothing else.
            add_generation_prompt: end with the beginning of the assistant's next turn.

        Raises:
            WorkhorseError: other messages, a template that refuses them or exceeds its limits.
        """
        _check_messages(messages)
        return self._render(messages, add_generation_prompt)

    def encode(
        self, tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a chat: the template's special tokens as such, all the rest as typed text.

        What the template writes that is no special token of this tokenizer is ordinary text.

        Raises:
            WorkhorseError: as `render`; and if the template takes messages apart so that its own
                special tokens cannot be told from theirs.
        """
        _check_messages(messages)
        for message in messages:
            if any(name in message["role"] for name in tokenizer.special_tokens):
                raise WorkhorseError(f"role {message['role']!r} holds a special token; name a role")
        stand_ins = _StandIns(messages)
        marked = self._render(stand_ins.messages, add_generation_prompt)
        plain = self._render(messages, add_generation_prompt)
        if stand_ins.put_back(marked) != plain:
            return _encode_inspected(tokenizer, plain, marked)
        ids: list[int] = []
        for part in _split(tokenizer, marked):
            special = tokenizer.special_tokens.get(part)
            ids += tokenizer.encode(stand_ins.put_back(part)) if special is None else [special]
        return ids

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **self._names,
        }
        with _one_line():
            environment = ChatEnvironment()  # its budget is for one rendering
            template = Template.from_code(environment, self._code, environment.globals)
            text = template.render(variables)
        if len(text) > MAX_TEXT:
            raise WorkhorseError(
                f"the chat is {len(text):,} characters long; at most {MAX_TEXT:,} can be rendered"
            )
        return text


@contextmanager
def _one_line() -> Iterator[None]:
    """What a template may raise, as one line for whoever brought it."""
    try:
        yield
    except TEMPLATE_FAILURES as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise WorkhorseError(
            f"the chat template cannot be used: {line}; change the template or the messages"
        ) from None


class _StandIns:
    """Messages whose contents are replaced by marks that occur in none of them.

    White space round a content stays outside its mark, so that a template may trim it.
    """

    def __init__(self, messages: Messages) -> None:
        nonce = _unused_nonce(messages)
        self._contents: dict[str, str] = {}
        self.messages: list[dict[str, str]] = []
        for index, message in enumerate(messages):
            content = message["content"]
            core = content.strip()
            mark = f"\ue000{nonce}.{index}\ue001" if core else ""
            self._contents[mark] = core
            marked = content.replace(core, mark, 1) if core else content
            self.messages.append({**message, "content": marked})
        self._mark = re.compile(rf"\ue000{nonce}\.\d+\ue001")

    def put_back(self, text: str) -> str:
        return self._mark.sub(lambda match: self._contents[match[0]], text)


def _unused_nonce(messages: Messages) -> str:
    while True:
        nonce = secrets.token_hex(8)
        if not any(nonce in text for message in messages for text in message.values()):
            return nonce


def _encode_inspected(tokenizer: Tokenizer, plain: str, marked: str) -> list[int]:
    """A template that takes contents apart: safe only if no content names a special token."""
    ours, all_of_them = (
        [part for part in _split(tokenizer, text) if part in tokenizer.special_tokens]
        for text in (marked, plain)
    )
    if ours != all_of_them:
        extra = next((name for name in all_of_them if name not in ours), all_of_them[-1:])
        raise WorkhorseError(
            f"this chat template takes messages apart, and one of them may hold {extra!r}, which "
            "could become a control token; take it out of the message"
        )
    return [
        number
        for part in _split(tokenizer, plain)
        for number in (
            [tokenizer.special_tokens[part]]
            if part in tokenizer.special_tokens
            else tokenizer.encode(part)
        )
    ]


def _split(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text cut into special tokens and what is between them; the longest name counts."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    if not names:
        return [text]
    return [part for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if part]


def _check_messages(messages: Messages) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            keys = sorted(message) if isinstance(message, Mapping) else message
            raise WorkhorseError(
                f"message {number} has {keys}; give each a 'role' and a 'content', nothing else"
            )
        for key, value in message.items():
            if not isinstance(value, str):
                raise WorkhorseError(f"message {number}: {key}={value!r} is no text; give a text")
    size = sum(len(message["content"]) for message in messages)
    if size > MAX_TEXT:
        raise WorkhorseError(f"the chat has {size:,} characters; at most {MAX_TEXT:,} can be used")
