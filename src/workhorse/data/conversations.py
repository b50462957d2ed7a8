"""Conversations as training data: from the fields of a record to token ids with weights.

The names of fields are those of data sets on the Hugging Face hub: messages, ShareGPT's
conversations, prompts with completions, pairs of a chosen and a rejected answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from workhorse.data.config import Learn, RowKind
from workhorse.errors import LARGEST, WorkhorseError, is_usable, nearest, shown

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer
    from workhorse.tokenizers.chat.learned import Learned

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""The role of a message by the field `from` of ShareGPT's records."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of a record: a conversation, or a prompt and its completion as strings."""

    messages: tuple[Message, ...] = ()
    n_prompt: int = 0
    """Number of messages at the start that are not learned."""
    tools: Any = None
    """JSON schemas of the functions that the assistant may call; None: no tools."""
    strings: tuple[str, str] | None = None
    """Prompt and completion, which are encoded without a template; None: use `messages`."""
    value: float | None = None
    """The margin of a pair, or 1 for a desirable and 0 for an undesirable answer."""
    learn: Learn = "assistant"
    """The tokens to learn; see `ConversationsConfig.learn`."""

    @property
    def text(self) -> str:
        """The contents of all messages, without the template."""
        if self.strings is not None:
            return "".join(self.strings)
        contents = (message.get("content") for message in self.messages)
        return "\n".join(
            content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            for content in contents
            if content
        )


class Record(NamedTuple):
    """A record of a data set."""

    identity: str
    """The string whose hash decides the split: the conversation, or the prompt of a pair."""
    examples: tuple[Example, ...]
    """One sequence, or the chosen and the rejected one."""


def record_of(
    fields: Mapping[str, Any], rows: RowKind, where: str, learn: Learn = "assistant"
) -> Record:
    """Parse a record of a data set.

    Args:
        fields: the fields of the record; a field that is None counts as missing.
        rows: the kind of the records; see `ConversationsConfig.rows`.
        where: file and line, for messages.
        learn: the tokens to learn of a conversation.

    Raises:
        WorkhorseError: fields are missing or malformed, or chosen and rejected answer are equal.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        match rows:
            case "conversations":
                example = replace(_conversation(fields), learn=learn)
                return Record(_identity(example), (example,))
            case "pairs":
                chosen, rejected = _pair(fields)
                prompt = chosen.messages[: chosen.n_prompt]
                identity = json.dumps([prompt, (chosen.strings or ("",))[0]], default=str)
                return Record(identity, (chosen, rejected))
            case "labels":
                label = _field(fields, "label")
                if label not in (True, False):
                    raise WorkhorseError(f"label={shown(label)} is not true or false; correct it")
                example = _completion(fields, float(label))
                return Record(_identity(example), (example,))
    except WorkhorseError as error:
        raise WorkhorseError(f"{where}: {error}") from None


def encode_example(example: Example, tokenizer: "Tokenizer", *, bos: bool, eos: bool) -> "Learned":
    """Encode a sequence and weight its tokens.

    Args:
        example: the sequence.
        tokenizer: the tokenizer, with a chat template unless the example has strings.
        bos: True to begin strings with the tokenizer's bos token; a template writes its own.
        eos: True to end strings with the eos token.

    Raises:
        WorkhorseError: the template rejects the messages, or no token would be learned.
    """
    from workhorse.tokenizers.chat.learned import Learned, encode_conversation
    from workhorse.tokenizers.chat.template import ChatTemplate

    if example.strings is not None:
        prompt, completion = tokenizer.encode_parts(*example.strings)
        before = [tokenizer.token_id(tokenizer.roles["bos"])] if bos else []
        after = [tokenizer.token_id(tokenizer.roles["eos"])] if eos else []
        learned = [*completion, *after]
        start = len(before) + len(prompt)
        weight = 1.0 if example.learn == "all" else 0.0
        return Learned([*before, *prompt, *learned], [weight] * start + [1.0] * len(learned))
    prompt = [{**message, "weight": 0} for message in example.messages[: example.n_prompt]]
    return encode_conversation(
        ChatTemplate.of(tokenizer),
        tokenizer,
        [*prompt, *example.messages[example.n_prompt :]],
        learn=example.learn,
        tools=example.tools,
    )


def _conversation(fields: Mapping[str, Any]) -> Example:
    if "prompt" in fields and "completion" in fields:
        return _completion(fields, None)
    known = [name for name in ("messages", "conversations") if name in fields]
    if not known and "chosen" in fields:
        raise WorkhorseError("this is a pair, with a field 'chosen'; set rows: pairs")
    if not known:
        raise WorkhorseError(
            "there is no field 'messages', 'conversations', or 'prompt' and 'completion'; "
            f"rename the field of the conversation ({nearest('messages', fields)})"
        )
    messages = _messages(fields[known[0]], known[0])
    if isinstance(system := fields.get("system"), str) and system:
        messages = ({"role": "system", "content": system}, *messages)
    return Example(messages, tools=_tools(fields))


def _completion(fields: Mapping[str, Any], value: float | None) -> Example:
    """Return the example of a record with `prompt` and `completion`; see `Example.value`."""
    return _answered(_field(fields, "prompt"), _field(fields, "completion"), fields, value)


def _pair(fields: Mapping[str, Any]) -> tuple[Example, Example]:
    """Return the examples of the chosen and the rejected answer.

    Without a prompt, it is the messages that both answers begin with.
    """
    chosen, rejected = _field(fields, "chosen"), _field(fields, "rejected")
    if chosen == rejected:
        raise WorkhorseError("chosen and rejected are equal; remove the record")
    margin = fields.get("margin", 0)
    if isinstance(margin, bool) or not is_usable(margin):
        raise WorkhorseError(
            f"margin={shown(margin)} is not a number from {-LARGEST:g} to {LARGEST:g}; correct it"
        )
    prompt = fields.get("prompt")
    if prompt is None:
        if isinstance(chosen, str) or isinstance(rejected, str):
            prompt = ""
        else:
            both = zip(chosen, rejected, strict=False)
            common = next((at for at, (a, b) in enumerate(both) if a != b), None)
            if common is None:
                raise WorkhorseError("one answer begins with the other; correct the record")
            prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    pair = (
        _answered(prompt, chosen, fields, float(margin)),
        _answered(prompt, rejected, fields, float(margin)),
    )
    both = zip(*(example.messages for example in pair), strict=False)
    first = next(({a["role"], b["role"]} for a, b in both if a != b), set[str]())
    if not first.isdisjoint(("system", "user")):
        raise WorkhorseError(
            "chosen and rejected answer different questions: their first different messages have "
            f"the role {' and '.join(sorted(first))}; give both answers the same prompt"
        )
    return pair


def _answered(prompt: Any, answer: Any, fields: Mapping[str, Any], value: float | None) -> Example:
    """Return the example of a prompt and an answer, both strings or both lists of messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise WorkhorseError("the answer is empty; remove the record")
        return Example(strings=(prompt, answer), value=value)
    if isinstance(prompt, str) != isinstance(answer, str):
        raise WorkhorseError("prompt and answer are a string and a list; use one form for both")
    before = _messages(prompt, "prompt") if prompt else ()
    after = _messages(answer, "the answer")
    return Example((*before, *after), len(before), _tools(fields), value=value)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    """Return messages with `role` and `content`, also from ShareGPT's form."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise WorkhorseError(f"{name}={shown(value)} is not a list of messages; correct it")
    return tuple(_message(given, f"message {number}") for number, given in enumerate(value))


def _message(given: Any, name: str) -> Message:
    if not isinstance(given, Mapping):
        raise WorkhorseError(f"{name} is {shown(given)}, not an object with 'role' and 'content'")
    message = _without_nulls(given)
    if "from" not in message:
        if not isinstance(message.get("role"), str):
            raise WorkhorseError(f"{name} has no role; add one such as user or assistant")
        return message
    speaker, content = message.pop("from"), message.pop("value", None)
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        roles = ", ".join(SHAREGPT_ROLES)
        raise WorkhorseError(f"{name} is from {shown(speaker)}; use one of {roles}")
    return {"role": SHAREGPT_ROLES[speaker], "content": content, **message}


def _without_nulls(value: Any) -> Any:
    """Remove fields that are None: Parquet files add the fields of every other message."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _tools(fields: Mapping[str, Any]) -> Any:
    tools = fields.get("tools")
    if not isinstance(tools, str):
        return _without_nulls(tools) or None
    try:
        return json.loads(tools) or None if tools.strip() else None
    except ValueError:
        raise WorkhorseError(f"tools={shown(tools)} is not JSON; correct it") from None


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise WorkhorseError(f"there is no field {name!r}; rename one ({nearest(name, fields)})")
    return fields[name]


def _identity(example: Example) -> str:
    return json.dumps([example.messages, example.strings], default=str)
