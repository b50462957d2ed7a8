"""Conversations as training data: from the fields of a record to token ids with weights.

The names of fields are those of data sets on the Hugging Face hub: messages, ShareGPT's
conversations, prompts with completions, pairs of a chosen and a rejected answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from workhorse.data.config import Learn, RowKind
from workhorse.errors import LARGEST, WorkhorseError, is_usable, nearest, shown

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer
    from workhorse.tokenizers.chat.learned import Learned
    from workhorse.tokenizers.chat.template import ChatTemplate

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

KIND_OF: Mapping[str, RowKind] = {
    "chosen": "pairs",
    "label": "labels",
    **dict.fromkeys(("messages", "conversations"), "conversations"),
}
"""The kind of a record with one of these fields; the first one decides."""


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
    except RecursionError:
        raise WorkhorseError(f"{where} is nested too deeply; correct or remove it") from None


def encode_example(example: Example, tokenizer: "Tokenizer", *, bos: bool, eos: bool) -> "Learned":
    """Encode a sequence and weight its tokens.

    Args:
        example: the sequence.
        tokenizer: the tokenizer, with a chat template unless the example has strings.
        bos: True to begin strings with the tokenizer's bos token; a template writes its own.
        eos: True to end strings with the eos token, and messages if the template has no token that
            ends a reply.

    Raises:
        WorkhorseError: there is no template, it rejects the messages, or no token would be learned.
    """
    from workhorse.tokenizers.chat.learned import Learned, encode_conversation

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
        _template_of(tokenizer),
        tokenizer,
        [*prompt, *example.messages[example.n_prompt :]],
        learn=example.learn,
        eos=eos,
        tools=example.tools,
    )


@lru_cache(maxsize=1)
def _template_of(tokenizer: "Tokenizer") -> "ChatTemplate":
    from workhorse.tokenizers.chat.template import ChatTemplate, with_template

    return ChatTemplate.of(with_template(tokenizer))


def _conversation(fields: Mapping[str, Any]) -> Example:
    if "prompt" in fields and "completion" in fields:
        return _completion(fields, None)
    known = [name for name in ("messages", "conversations") if name in fields]
    if not known:
        raise _no_field(fields, "messages", "conversations")
    messages = (*_system(fields), *_messages(fields[known[0]], known[0]))
    return Example(messages, tools=_tools(fields))


def _completion(fields: Mapping[str, Any], value: float | None) -> Example:
    """Return the example of a record with `prompt` and `completion`; see `Example.value`."""
    prompt = _given(_field(fields, "prompt"), "prompt")
    answer = _given(_field(fields, "completion"), "completion")
    if prompt and not isinstance(answer, str) and answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]  # a whole conversation
    return _answered(prompt, answer, fields, value)


def _pair(fields: Mapping[str, Any]) -> tuple[Example, Example]:
    """Return the examples of the chosen and the rejected answer.

    If they are whole conversations, the prompt is their common beginning.
    """
    given = [_field(fields, name) for name in ("chosen", "rejected")]
    prompt = fields.get("prompt")
    if prompt is None and all(isinstance(one, Mapping) for one in given):
        prompt = fields.get("conversations", fields.get("messages"))  # as in LLaMA-Factory
    chosen, rejected = map(_given, given, ("chosen", "rejected"))
    if chosen == rejected:
        raise WorkhorseError("chosen and rejected are equal; remove the record")
    margin = fields.get("margin", 0)
    if isinstance(margin, bool) or not is_usable(margin):
        raise WorkhorseError(
            f"margin={shown(margin)} is not a number from {-LARGEST:g} to {LARGEST:g}; correct it"
        )
    prompt = None if prompt is None else _given(prompt, "prompt")
    prompt, *answers = _divided(prompt, chosen, rejected)
    chosen, rejected = (_answered(prompt, one, fields, float(margin)) for one in answers)
    both = zip(chosen.messages, rejected.messages, strict=False)
    first = next(({a["role"], b["role"]} for a, b in both if a != b), set[str]())
    if not first.isdisjoint(("system", "user")):
        raise WorkhorseError(
            "chosen and rejected answer different questions: their first different messages have "
            f"the role {' and '.join(sorted(first))}; give both answers the same prompt"
        )
    return chosen, rejected


Given = str | tuple[Message, ...]
"""A prompt or an answer: a string, or messages."""
_WORDS = re.compile(r" ?(?:[^\W_]+|[^ ])| ")
"""Divides a string before each word, and before the space that precedes it."""


def _divided(prompt: Given | None, chosen: Given, rejected: Given) -> tuple[Given, Given, Given]:
    """Return the prompt of a pair, and the answers without it if both begin with it.

    The prompt None is the common beginning. A string is not used if the answers are messages that
    include the user's.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt = "".join(_common(_WORDS.findall(chosen), _WORDS.findall(rejected)))
        size = len(prompt) if len(prompt) < min(len(chosen), len(rejected)) else 0
        size = size if chosen[:size] == rejected[:size] == prompt else 0
        return prompt, chosen[size:], rejected[size:]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise WorkhorseError("chosen and rejected are a string and a list; use one form for both")
    common = _common(chosen, rejected)
    if prompt is None or (isinstance(prompt, str) and any(m["role"] == "user" for m in common)):
        prompt = ()
    given = () if isinstance(prompt, str) else prompt
    asked, repeated = ([m for m in many if m["role"] != "system"] for many in (given, common))
    if isinstance(prompt, str) or repeated[: len(asked)] != asked:
        return prompt, chosen, rejected
    more = (message for message in prompt if message not in common)
    return (*more, *common), chosen[len(common) :], rejected[len(common) :]


def _common(one: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    """Return the common beginning, which is shorter than either sequence."""
    last = max(min(len(one), len(other)) - 1, 0)
    return one[: next((n for n in range(last) if one[n] != other[n]), last)]


def _answered(
    prompt: Given, answer: Given, fields: Mapping[str, Any], value: float | None
) -> Example:
    """Return the example of a prompt and an answer, both strings or both lists of messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise WorkhorseError("the answer is empty; remove the record")
        return Example(strings=(prompt, answer), value=value)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise WorkhorseError("prompt and answer are a string and a list; use one form for both")
    prompt = (*_system(fields), *prompt)
    return Example((*prompt, *answer), len(prompt), _tools(fields), value=value)


def _given(value: Any, name: str) -> Given:
    """Return a prompt or an answer: a string, messages, or one message, which is an object."""
    if isinstance(value, str):
        return value
    if name == "prompt" and value == []:
        return ()
    return _messages([value] if isinstance(value, Mapping) else value, name)


def _system(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the message of the field `system`, if it is there."""
    system = fields.get("system")
    return ({"role": "system", "content": system},) if system and isinstance(system, str) else ()


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    """Return messages with `role` and `content`, also from ShareGPT's form."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise WorkhorseError(f"{name}={shown(value)} is not a list of messages; correct it")
    return tuple(_message(given, f"message {number}") for number, given in enumerate(value))


def _message(given: Any, name: str) -> Message:
    if not isinstance(given, Mapping):
        raise WorkhorseError(f"{name} is {shown(given)}, not an object with 'role' and 'content'")
    message = without_nulls(given, below="arguments")
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call, name) for call in calls]
    if "from" not in message:
        if not isinstance(message.get("role"), str):
            raise WorkhorseError(f"{name} has no role; add one such as user or assistant")
        return message
    speaker, content = message.pop("from"), message.pop("value", None)
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        roles = ", ".join(SHAREGPT_ROLES)
        raise WorkhorseError(f"{name} is from {shown(speaker)}; use one of {roles}")
    return {"role": SHAREGPT_ROLES[speaker], "content": content, **message}


def _call(call: Any, name: str) -> Any:
    """Return a tool call with its arguments as an object. They may be given as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given, str):
        return call
    found = _parsed(given, "arguments")
    if not isinstance(found, dict):
        raise WorkhorseError(f"{name}: arguments={shown(given)} is not a JSON object; correct it")
    function = {**function, "arguments": found}
    return {**call, "function": function} if "function" in call else function


def without_nulls(value: Any, below: str | None = None) -> Any:
    """Return data without fields that are None; the values of the key `below` are kept."""
    if isinstance(value, Mapping):
        return {
            name: inner if name == below else without_nulls(inner, below)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [without_nulls(inner, below) for inner in value]
    return value


def _tools(fields: Mapping[str, Any]) -> Any:
    tools = fields.get("tools")
    return (_parsed(tools, "tools") if isinstance(tools, str) else tools) or None


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text if text.strip() else "{}")
    except (ValueError, RecursionError):
        raise WorkhorseError(f"{name}={shown(text)} is not JSON; correct it") from None


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise _no_field(fields, name, "pairs" if name in ("chosen", "rejected") else "labels")
    return fields[name]


def _no_field(fields: Mapping[str, Any], name: str, rows: RowKind) -> WorkhorseError:
    """Return the error for a record without a field, which may be a record of other `rows`."""
    known, kind = next((one for one in KIND_OF.items() if one[0] in fields), ("", rows))
    remedy = f"rename a field, or add it ({nearest(name, fields)})"
    if kind != rows:
        remedy = f"set rows: {kind} for records with {known!r}"
    return WorkhorseError(f"there is no field {name!r}; {remedy}")


def _identity(example: Example) -> str:
    return json.dumps([example.messages, example.strings], default=str)
