"""From the body of a request to the prompt and the options of the engine."""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig
from workhorse.generate.conversation import ChatFormat, TemplateFormat, TranscriptFormat
from workhorse.generate.options import table
from workhorse.serve.errors import CONTEXT_EXCEEDED, bad_request
from workhorse.serve.messages import ModelFacts
from workhorse.serve.schema import ChatRequest, CompletionRequest, Message, Sampling
from workhorse.serve.tools import Tools
from workhorse.tokenizers import ChatTemplate
from workhorse.tokenizers.chat.reply_format import ReplyFormat
from workhorse.tokenizers.chat.reply_learned import after_prompt, reply_format

LEAST_P = 1e-9
"""Used for `top_p: 0`, which keeps only the likeliest token."""


class Prompts:
    """Encodes prompts and chats of a model, and makes the options of the engine."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.tokenizer = facts.tokenizer
        self._format: ChatFormat = TranscriptFormat(facts.tokenizer, facts.beginning.prefix)
        self.replies = self._learned = ReplyFormat()
        if facts.trained_to_chat:
            template = ChatTemplate.of(facts.tokenizer, facts.settings.template)
            self._format = TemplateFormat(template, facts.tokenizer)
            self._learned = reply_format(template)
            self.replies = after_prompt(self._learned, template)
        self._shown = tuple(
            token
            for name, token in facts.tokenizer.special_tokens.items()
            if name in self._learned.literals
        )

    def of_text(self, text: str) -> list[int]:
        """Encode a text as the beginning of a training document.

        Raises:
            ApiError: it cannot be encoded.
        """
        try:
            return self._facts.beginning.encode(self.tokenizer, text)
        except WorkhorseError as error:
            raise bad_request(str(error), "prompt") from None

    def of_chat(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a chat, up to the beginning of the assistant's reply.

        Args:
            messages: the chat.
            tools: the tools that the reply may call.
            variables: other variables of the chat template; see `variables`.

        Raises:
            ApiError: the template refuses it, or it cannot be encoded.
        """
        if tools is not None and self.replies.calls is None:
            why = "the model's chat template has no format for tools"
            if not self._facts.trained_to_chat:
                why = "the model was not trained to chat"
            raise bad_request(f"tools cannot be used: {why}; omit them", "tools", "not_served")
        given = [self._plain(number, message) for number, message in enumerate(messages)]
        _check_calls(messages)
        try:
            if isinstance(self._format, TemplateFormat):
                described = None if tools is None else tools.described
                return self._format.template.encode(
                    self.tokenizer, given, tools=described, **(variables or {})
                )
            return self._format.encode(given)
        except WorkhorseError as error:
            raise bad_request(str(error), "messages") from None

    def _plain(self, number: int, message: Message) -> dict[str, Any]:
        """Return a message as templates read it: text as one string, `developer` as `system`."""
        fields = message.model_dump(exclude_none=True)
        if not isinstance(message.content, str):
            fields["content"] = "".join(part.text for part in message.content or ())
        fields["role"] = "system" if message.role == "developer" else message.role
        where, calls = f"messages.{number}", self.replies.calls
        if not self._facts.trained_to_chat and (message.role == "tool" or message.tool_calls):
            raise bad_request(
                "the model was not trained to chat, so it has no role 'tool' and no tool_calls; "
                "use messages with content of the roles system, user and assistant",
                f"{where}.tool_calls" if message.tool_calls else f"{where}.role",
            )
        if message.content is None and calls is not None:
            fields["content"] = calls.content
        for index, call in enumerate(fields.get("tool_calls", ())):
            if calls is None or calls.arguments == "mapping":
                given = call["function"]["arguments"]
                try:
                    call["function"]["arguments"] = _object(given)
                except ValueError:
                    raise bad_request(
                        f"the arguments {given[:80]!r} are not a JSON object; correct them",
                        f"{where}.tool_calls.{index}.function.arguments",
                    ) from None
        return fields

    def variables(self, body: ChatRequest) -> dict[str, Any]:
        """Return the variables of the chat template that a request gives.

        Raises:
            ApiError: the template does not read a variable.
        """
        read: Collection[str] = ()
        if isinstance(self._format, TemplateFormat):
            read = self._format.template.variables
        found: dict[str, Any] = {}
        if (effort := body.reasoning_effort) is not None:
            values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            found = {name: value for name, value in values.items() if name in read}
            if not found and (effort != "none" or self.replies.reasoning):
                raise bad_request(
                    "the model's chat template has no variable for the amount of reasoning; omit "
                    "it",
                    "reasoning_effort",
                    "not_served",
                )
        for name in body.chat_template_kwargs:
            if name not in read:
                raise bad_request(
                    f"the model's chat template has no variable {name[:40]!r}; omit it",
                    "chat_template_kwargs",
                )
        return found | body.chat_template_kwargs

    def format_of_reply(self, variables: Mapping[str, Any]) -> ReplyFormat:
        """Return the format of replies, if the chat template gets these variables."""
        if not variables or not isinstance(self._format, TemplateFormat):
            return self.replies
        return after_prompt(self._learned, self._format.template, **variables)

    def check(self, prompt: list[int], param: str) -> None:
        """Check a prompt's length and ids.

        Raises:
            ApiError: it is empty or longer than the context, or an id is not in the vocabulary.
        """
        facts = self._facts
        if not prompt:
            raise bad_request("the prompt is empty; give at least one token", param)
        most = min(facts.context, facts.cache_tokens)
        if len(prompt) > most:
            raise bad_request(
                f"This model's maximum context length is {most} tokens, and the prompt has "
                f"{len(prompt)} tokens; shorten it",
                param,
                CONTEXT_EXCEEDED,
            )
        if max(prompt) >= facts.vocab:
            raise bad_request(
                f"token id {max(prompt)} is not in the vocabulary; choose 0 to {facts.vocab - 1}",
                param,
            )

    def options(
        self, body: Sampling, prompt: list[int], most_new: int | None, samples: int = 1
    ) -> GenerationConfig:
        """Return the options for a prompt.

        Args:
            body: the request.
            prompt: the token ids.
            most_new: the maximum number of new tokens; None: until the context is full.
            samples: the number of completions.

        Raises:
            ApiError: an option is out of range.
        """
        facts = self._facts
        most = facts.settings.max_sequences
        if samples > most:
            raise bad_request(
                f"n={samples} is more than {most}, the completions that this server generates at a "
                "time; reduce n",
                "n",
            )
        room = min(facts.context + 1, facts.cache_tokens) - len(prompt)
        sampling = self._sampling(body, samples)
        try:
            return GenerationConfig(
                **sampling,
                **self._ends(body),
                max_new_tokens=max(1, room if most_new is None else min(most_new, room)),
                logit_bias=self._bias(body.logit_bias or {}),
                exact=facts.is_exact,
                speculate=facts.settings.speculate,
            )
        except ConfigError as error:
            name = re.split(r"\W", str(error), maxsplit=1)[0]
            field = name if name in type(body).model_fields else None
            raise bad_request(str(error), field) from None
        except ValidationError as error:
            raise bad_request(str(error)) from None

    def _sampling(self, body: Sampling, samples: int) -> dict[str, Any]:
        """Return the options that choose tokens; the request's replace the model's."""
        options = self._facts.sampling | body.numbers()
        if options.get("top_k") == 0:
            del options["top_k"]
        if options.get("temperature") == 0:
            rows = table()
            return {
                name: one for name, one in options.items() if "greedy" in rows[name].option.read_by
            }
        if "top_p" in options:
            options["top_p"] = max(options["top_p"], LEAST_P)
        return {**options, "seed": _seed(body.seed), "n_samples": samples}

    def _ends(self, body: Sampling) -> dict[str, Any]:
        """Return the options for the end of a completion, and for special tokens in its text."""
        is_chat = not isinstance(body, CompletionRequest)
        ends = self._facts.reply_stop_tokens if is_chat else self._facts.stop_tokens
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        special = self.tokenizer.special_tokens
        named = [special[text] for text in stop if text in special]
        return {
            "stop": stop + (self._format.stop if is_chat else ()),
            "stop_tokens": (*(() if body.ignore_eos else ends), *named),
            "shown_tokens": self._shown if is_chat else (),
        }

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias: dict[int, float] = {}
        for name, value in given.items():
            # Python converts no more than 4,300 digits.
            if not (re.fullmatch("[0-9]{1,10}", name) and int(name) < self._facts.vocab):
                raise bad_request(
                    f"logit_bias has the key {name[:20]!r}, which is not a token id; choose 0 to "
                    f"{self._facts.vocab - 1}",
                    "logit_bias",
                )
            bias[int(name)] = value
        return bias


def _check_calls(messages: Sequence[Message]) -> None:
    """Check that each message of a tool answers an earlier call."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or ()}
        if message.tool_call_id is not None and message.tool_call_id not in called:
            raise bad_request(
                f"no earlier message calls a tool with the id {message.tool_call_id[:80]!r}; "
                "correct it",
                f"messages.{number}.tool_call_id",
            )


def _seed(given: int | None) -> int:
    """Return a seed that leaves room for the seeds of further completions."""
    return secrets.randbits(32) if given is None else given % 2**62


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if the text is not one."""
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
