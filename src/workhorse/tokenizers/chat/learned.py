"""Finds the tokens of a conversation that are learned, from the chat template as it is.

A template does not mark the part of its output that the assistant must write. It is found by
comparing the rendering of the whole conversation with renderings of its first messages. The turn of
an assistant's message

- begins where the whole rendering first differs from the rendering of the messages before it with
  the generation prompt,
- ends where the whole rendering first differs from the rendering of the messages up to it. Text
  after the last control token of the turn, such as a line break, is not part of it. If a template
  ends turns with the first token of the next one, that token is included, also after the last
  message.

The rendering of the first messages may differ from the beginning of the whole rendering: templates
omit earlier reasoning, or move the system message. So each message gets an anchor, a random string
that is found again in each rendering, and renderings are compared from an anchor on.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from workhorse.errors import LARGEST, WorkhorseError, is_usable, shown
from workhorse.tokenizers.chat.messages import REASONING, functions_of, with_functions
from workhorse.tokenizers.chat.template import ChatTemplate, Messages, check_calls, is_rendered
from workhorse.tokenizers.tokenizer import Tokenizer

Learn = Literal["assistant", "last", "all"]
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
OURS = ("weight", "train")
"""Keys of a message that are options of `encode_conversation`; templates do not see them."""

_WORD = re.compile(r"[<\[]?/?\w*\Z")
"""Matches the word, or the beginning of a tag, at the end of a string."""

Render = Callable[[Messages, bool], str]
"""Renders messages, with the generation prompt if the second argument is True."""


class Learned(NamedTuple):
    """A conversation as token ids."""

    ids: list[int]
    weights: list[float]
    """The loss weight of each token; 0: it is not learned."""


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    learn: Learn = "assistant",
    eos: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> Learned:
    """Encode a conversation, and weight the tokens that the assistant must produce.

    These are its reasoning, content, tool calls, and the token that ends its turn; not the
    generation prompt. A message of another role that has a weight is learned from its content to
    the token that ends its turn.

    Args:
        template: the model's chat template.
        tokenizer: the model's tokenizer.
        messages: the messages. A message's `weight` (a number) or `train` (a boolean) replaces the
            weight of its turn, which is 1 for the messages that `learn` selects and 0 for others.
        learn: `assistant`: all assistant messages; `last`: only the last one; `all`: every token,
            whatever the messages' weights are.
        eos: True to end with the tokenizer's eos token if the template ends replies with no token.
        tools: see `ChatTemplate.render`.
        variables: see `ChatTemplate.render`.

    Raises:
        WorkhorseError: the template rejects the messages, a role is unknown, the last message is
            not the assistant's, a learned message is empty, or its turn cannot be found; or the
            template omits the tools, or a tool call.
    """
    weights = _weights(messages, learn)
    as_json = any(map(functions_of, messages)) and template.for_tools(tools).reads_json_arguments
    messages = [
        {name: value for name, value in message.items() if name not in OURS} for message in messages
    ]
    messages = [_with_json_arguments(one) for one in messages] if as_json else messages
    encoder, spelled = template.spelling(tokenizer, tools=tools, **variables)
    text = spelled(messages, False)
    check_calls(messages, text, lambda changed: spelled(changed, False))
    _, without_tools = template.spelling(tokenizer, **variables)
    if tools and is_rendered(messages, text, lambda same: without_tools(same, False)):
        raise WorkhorseError("the chat template omits the tools; remove the field tools")
    turns = _Turns(messages, spelled, text, encoder.spans)
    text, ended = turns.ended()
    end_id = None if ended or not eos else tokenizer.eos_id
    ids, offsets = encoder.encode_with_offsets(text if end_id is None else text.rstrip())
    if learn == "all":
        weights = {}
    learned = [float(learn == "all")] * len(ids)
    for number, weight in weights.items():
        start, end = turns.span(number)
        inside = [index for index, (begin, _) in enumerate(offsets) if start <= begin < end]
        if not inside:
            raise WorkhorseError(f"message {number} has no token to learn; remove it")
        for index in inside:
            learned[index] = weight
    if end_id is not None:
        ids.append(end_id)
        learned.append(float(learn == "all") or weights.get(len(messages) - 1, 0.0))
    return Learned(ids, learned)


def _weights(messages: Messages, learn: Learn) -> dict[int, float]:
    """Return the weight of each message that is learned, after checking the messages."""
    if not messages:
        raise WorkhorseError("the conversation has no messages; remove it")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise WorkhorseError(
                f"message {number} has the role {shown(message.get('role'))}; use one of "
                f"{', '.join(sorted(ROLES))}"
            )
    speakers = [message["role"] for message in messages]
    if learn != "all" and speakers[-1] != "assistant":
        raise WorkhorseError(
            f"the last message is of the role {speakers[-1]}, not of the assistant; add an answer"
        )
    last = len(messages) - 1
    weights: dict[int, float] = {}
    for number, (message, role) in enumerate(zip(messages, speakers, strict=True)):
        chosen = role == "assistant" and (learn == "assistant" or number == last)
        weight = _weight(message, number, float(chosen))
        if not weight:
            continue
        if not any(message.get(name) for name in ("content", "tool_calls", *REASONING)):
            raise WorkhorseError(f"message {number} ({role}) is empty; remove it or set weight: 0")
        weights[number] = weight
    if not weights and learn != "all":
        raise WorkhorseError("all messages have weight 0, so nothing is learned; remove the record")
    return weights


def _weight(message: Mapping[str, Any], number: int, default: float) -> float:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise WorkhorseError(f"message {number}: train={shown(train)} is not true or false")
    if weight is None:
        return default if train is None else float(train)
    if isinstance(weight, bool) or not is_usable(weight) or weight < 0:
        raise WorkhorseError(
            f"message {number}: weight={shown(weight)} is not a number from 0 to {LARGEST:g}"
        )
    return float(weight)


class _Turns:
    """Finds the turns of messages in the rendering of a conversation.

    Args:
        messages: the messages.
        render: renders messages; control tokens are spelled in a way that no message can contain.
        text: the rendering of all messages.
        spans: returns (start, end) of each control token in a rendering.
    """

    def __init__(
        self,
        messages: Messages,
        render: Render,
        text: str,
        spans: Callable[[str], Sequence[tuple[int, int]]],
    ) -> None:
        self.render = render
        self.text = text
        self.spans = spans
        self.controls = spans(text)
        self.messages = messages
        self._added: int | None = None
        self._nonce = f"{secrets.randbelow(10**20):020}"  # digits: filters do not change their case
        self._mark = re.compile(rf"{self._nonce}(\d{{6}})")
        self.anchored, self.anchors = self._anchor()

    def span(self, number: int) -> tuple[int, int]:
        """Return the start and end of the learned part of a message."""
        if number not in self.anchors:
            raise WorkhorseError(
                f"the chat template omits or changes message {number} "
                f"({self.messages[number]['role']}); set its weight to 0"
            )
        start, end = self._start(number), self._end(number)
        if number == len(self.messages) - 1 and self._added is not None:
            end = self._added
        others = [one for one, at in self.anchors.items() if one != number and start < at <= end]
        if others or not start <= self.anchors[number] <= end:
            raise self._moved(number)
        return start, end

    def ended(self) -> tuple[str, bool]:
        """Return the text, and True if a control token ends the reply that is its last message.

        If only the first token of the next turn ends a reply, the text ends with that token.
        """
        last = len(self.messages) - 1
        message, anchor = self.messages[last], self.anchors.get(last)
        if message["role"] != "assistant" or anchor is None:
            return self.text, True
        if any(one >= anchor for one, _ in self.controls) and self._closes(last):
            return self.text, True
        rest = self.text[anchor:].rstrip()
        role = "tool" if message.get("tool_calls") else "user"
        text, found = self._tried([*self.anchored, {"role": role, "content": "a"}])
        close = found.get(last, len(text)) + len(rest)
        following = next((one for one in self.spans(text) if one[0] >= close), None)
        if following and text[found[last] : following[0]].rstrip() == rest:
            whole = self.text[:anchor] + rest + text[close : following[1]]
            self._added = len(whole)
            return whole, True
        return self.text, False

    def _moved(self, number: int) -> WorkhorseError:
        return WorkhorseError(
            f"the chat template mixes message {number} ({self.messages[number]['role']}) with "
            "others, so its turn cannot be found; set its weight to 0"
        )

    def _start(self, number: int) -> int:
        """Find the end of the generation prompt before a message, or the start of its content."""
        if self.messages[number]["role"] != "assistant":
            return self._content(number)
        prefix, positions = self._prefix(number, True)
        origin, begin = self._previous(number, positions)
        prompt = prefix[begin:]
        at = origin + _common(self.text[origin:], prompt)
        if at < origin + len(prompt):  # the prompt continues differently, for example with <think>
            at = next((start for start, end in self.controls if start < at < end), at)
            known = max(origin, *(end for _, end in self.controls if end <= at), 0)
            at = known + len(_WORD.sub("", self.text[known:at]))
        return at

    def _content(self, number: int) -> int:
        """Find the start of a message's content."""
        content = self.messages[number].get("content")
        if not isinstance(content, str):
            raise self._moved(number)
        core = content.lstrip()
        changed = content.removesuffix(core) + self._anchor_of(number) + core
        messages = [*self.messages]
        messages[number] = {**messages[number], "content": changed}
        text, found = self._tried(messages)
        if text != self.text or number not in found:
            raise self._moved(number)
        return found[number]

    def _end(self, number: int) -> int:
        """Find the end of a message's turn, including the control token that ends it."""
        anchor, end = self.anchors[number], len(self.text)
        if number < len(self.messages) - 1:
            prefix, positions = self._prefix(number + 1, False)
            at = positions.get(number, 0)
            origin, begin = self._previous(number, positions)
            here, there = self.text[origin:anchor], prefix[begin:at]
            kept = _common(here, there) + _common(here[::-1], there[::-1])
            if kept < len(here):  # more than reasoning is missing
                raise self._moved(number)
            end = anchor + _common(self.text[anchor:], prefix[at:])
            end = next((one for one, stop in self.controls if one < end < stop), end)
        stops = [stop for one, stop in self.controls if anchor <= one < end]
        if stops and self._closes(number):
            return stops[-1]
        close = anchor + len(self.text[anchor:end].rstrip())
        following = [one for one in self.controls if one[0] >= close]
        if following and not self.text[close : following[0][0]].strip():
            return following[0][1]  # the first token of the next turn, or another one than usual
        return close

    def _closes(self, number: int) -> bool:
        """Return True if a control token ends turns, not only tool calls or reasoning in them."""
        message = self.messages[number]
        if message.get("content") and not message.get("tool_calls"):
            return True
        plain = {"role": message["role"], "content": self._anchor_of(number)}
        text, found = self._tried([*self.anchored[:number], plain])
        return number not in found or any(one >= found[number] for one, _ in self.spans(text))

    def _prefix(self, count: int, prompt: bool) -> tuple[str, dict[int, int]]:
        """Render the first messages; return what `_found` returns."""
        try:
            return self._found(self.render(self.anchored[:count], prompt))
        except WorkhorseError as error:
            if count:
                raise
            raise WorkhorseError(
                "message 0 is the assistant's, but the chat template has no generation prompt "
                "without messages; set its weight to 0"
            ) from error

    def _previous(self, number: int, positions: Mapping[int, int]) -> tuple[int, int]:
        """Return the position of the last anchor before a message, in `text` and in a prefix."""
        before = [one for one in self.anchors if one < number]
        if not before:
            return 0, 0
        if before[-1] not in positions:
            raise self._moved(number)
        return self.anchors[before[-1]], positions[before[-1]]

    def _tried(self, messages: Messages) -> tuple[str, dict[int, int]]:
        """Render messages as `_found`; an error of the template counts as an empty rendering."""
        with suppress(WorkhorseError):
            return self._found(self.render(messages, False))
        return "", {}

    def _anchor(self) -> tuple[list[Mapping[str, Any]], dict[int, int]]:
        """Add an anchor to each message, in the first string where the template keeps it.

        Returns:
            The messages, and the position in the text of each anchor that was kept.
        """
        copies = [
            _anchored(message, self._anchor_of(number))
            for number, message in enumerate(self.messages)
        ]  # for each message, the copies to try
        anchored = [
            attempts[0] if attempts else message
            for attempts, message in zip(copies, self.messages, strict=True)
        ]
        text, anchors = self._tried(anchored)
        if text == self.text and len(anchors) == sum(map(bool, copies)):
            return anchored, anchors
        anchored, anchors = list(self.messages), {}
        for number, attempts in enumerate(copies):
            for changed in attempts:
                attempt = [*anchored[:number], changed, *self.messages[number + 1 :]]
                text, found = self._tried(attempt)
                if text == self.text and found.keys() == {*anchors, number}:
                    anchored, anchors = attempt, found
                    break
        return anchored, anchors

    def _found(self, rendered: str) -> tuple[str, dict[int, int]]:
        """Remove the anchors from a rendering.

        Returns:
            The rendering without them, and the position there of each anchor that occurs once, or
            first after a function's name.
        """
        parts = self._mark.split(rendered)
        numbers = [int(one) for one in parts[1::2]]
        ends = accumulate(map(len, parts[::2]))
        found: dict[int, int] = {}
        for number, part, end in zip(numbers, parts[::2], ends, strict=False):
            called = functions_of(self.messages[number])  # templates repeat the name at the result
            if numbers.count(number) == 1 or part.endswith(called):
                found.setdefault(number, end)
        return "".join(parts[::2]), dict(sorted(found.items()))

    def _anchor_of(self, number: int) -> str:
        """Return the anchor of a message."""
        return f"{self._nonce}{number:06d}"


def _anchored(message: Mapping[str, Any], mark: str) -> list[Mapping[str, Any]]:
    """Return copies of a message with the mark in its content, tool calls, or reasoning."""
    copies: list[Mapping[str, Any]] = []
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        copies.append({**message, "content": _marked(content, mark)})
    if isinstance(content, list):
        for number in reversed(range(len(content))):
            part = content[number]
            if isinstance(part, Mapping) and str(part.get("text") or "").strip():
                changed = {**part, "text": _marked(part["text"], mark)}
                copies.append(
                    {**message, "content": [*content[:number], changed, *content[number + 1 :]]}
                )
                break
    for number in reversed(range(len(functions_of(message)))):
        copies.append(
            with_functions(
                message,
                lambda at, of, n=number: {**of, "name": of["name"] + mark} if at == n else of,
            )
        )
    for key in REASONING:
        if isinstance(reasoning := message.get(key), str) and reasoning.strip():
            copies.append({**message, key: _marked(reasoning, mark)})
    return copies


def _marked(text: str, mark: str) -> str:
    """Insert a mark before the white space at the end of a string."""
    core = text.rstrip()
    return core + mark + text[len(core) :]


def _with_json_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the arguments of its calls as strings."""

    def change(_: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
        given = function.get("arguments", "")
        as_json = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**function, "arguments": as_json}

    return with_functions(message, change)


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
