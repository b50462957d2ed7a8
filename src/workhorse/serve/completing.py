"""The routes /v1/chat/completions and /v1/completions: answers with choices."""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from workhorse.generate import Delta, TokenLogprob
from workhorse.serve.answers import DONE, FINISH, Offsets, event
from workhorse.serve.errors import ApiError, bad_request
from workhorse.serve.generating import (
    Answer,
    Choice,
    Job,
    Server,
    Steps,
    grammar_of_form,
    jobs_of_chat,
)
from workhorse.serve.messages import GrammarSource
from workhorse.serve.schema import MOST_CHOICES, ChatRequest, ChoicesRequest, CompletionRequest
from workhorse.tokenizers.chat.reply_reader import Piece

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's API."""


Asked = TypeVar("Asked", bound=ChoicesRequest)


class ChoicesAnswer(Answer[Asked]):
    """An answer with a list of choices."""

    kind: str
    """`object` of the whole answer."""
    kind_of_part: str
    """`object` of an event of the stream."""
    prefix: str
    """Beginning of the answer's id."""

    def __init__(self, server: Server, body: Asked, jobs: list[Job], state: Any) -> None:
        super().__init__(server, body, jobs, state)
        self._envelope = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model,
        }

    @abstractmethod
    def part(self, choice: Choice, deltas: Sequence[Delta], *, whole: bool) -> dict[str, Any]:
        """Format new tokens of a choice; the complete choice if `whole`."""

    async def _whole(self, steps: Steps) -> Response:
        collected: dict[int, list[Delta]] = {}
        async for choice, deltas in steps:
            collected.setdefault(choice.index, []).extend(deltas)
        choices = [choice for job in self._jobs for choice in job.choices]
        parts = [self.part(choice, collected[choice.index], whole=True) for choice in choices]
        answer = self._envelope | {"choices": parts, "usage": self.usage}
        if self.body.timings:
            answer["timings"] = self._timings.milliseconds
        return JSONResponse(answer)

    def events(self, choice: Choice, deltas: list[Delta]) -> Iterator[bytes]:
        fields = self.part(choice, deltas, whole=False)
        if not choice.sent or _says_anything(fields):
            choice.sent = True
            yield self._event([fields], {"usage": None} if self._with_usage else {})

    def end(self) -> Iterator[bytes]:
        last: dict[str, Any] = {"usage": self.usage} if self._with_usage else {}
        if self.body.timings:
            last["timings"] = self._timings.milliseconds
        if last:
            yield self._event([], last)
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body) + DONE

    def _event(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return event(self._envelope | {"object": self.kind_of_part, "choices": choices} | extra)

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens."""
        return self._timings.usage

    @property
    def _with_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and options.include_usage


def _says_anything(fields: dict[str, Any]) -> bool:
    """False for a part without text, log-probabilities and end, such as half a character."""
    parts = [fields["text"]] if "text" in fields else fields["delta"].values()
    return any(parts) or bool(fields["logprobs"] or fields["finish_reason"])


class ChatAnswer(ChoicesAnswer[ChatRequest]):
    """The answer to POST /v1/chat/completions."""

    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"
    prefix = "chatcmpl"

    @property
    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": self.reasoning}
        return super().usage | {"completion_tokens_details": details}

    def part(self, choice: Choice, deltas: Sequence[Delta], *, whole: bool) -> dict[str, Any]:
        finish = deltas[-1].finish_reason
        message = self._message(choice, choice.read(deltas), whole=whole)
        logprobs = self.texts.chat_logprobs(deltas) if self.body.logprobs else None
        reason = None if finish is None else FINISH[finish]
        if choice.calls and reason == "stop":
            reason = "tool_calls"
        role = {} if choice.sent else {"role": "assistant"}
        fields = {"index": choice.index, "logprobs": logprobs, "finish_reason": reason}
        return fields | {"message" if whole else "delta": role | message}

    @staticmethod
    def _message(choice: Choice, pieces: Sequence[Piece], *, whole: bool) -> dict[str, Any]:
        """Format new parts of a message; the complete message if `whole`."""
        message: dict[str, Any] = {"content": _text("text", pieces)}
        if reasoning := _text("reasoning", pieces):
            message["reasoning_content"] = reasoning
        for call in (piece.call for piece in pieces if piece.call is not None):
            function = {"name": call.name, "arguments": call.arguments}
            index = {} if whole else {"index": choice.calls}
            found = {**index, "id": call.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(found)
            choice.calls += 1
        if not whole:
            return message
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        return message | {"refusal": None, "annotations": []}


def _text(kind: str, pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    """The answer to POST /v1/completions."""

    kind = kind_of_part = "text_completion"
    prefix = "cmpl"

    @property
    def is_scored(self) -> bool:
        """True if the answer has no new token (`max_tokens: 0`): the engine generates one."""
        return self.body.max_tokens == 0

    def counted(self, deltas: list[Delta]) -> list[Delta]:
        return [] if self.is_scored else deltas

    def part(self, choice: Choice, deltas: Sequence[Delta], *, whole: bool) -> dict[str, Any]:
        finish = deltas[-1].finish_reason
        text = "" if self.is_scored else "".join(delta.text for delta in deltas)
        logprobs = None
        if choice.offsets is not None:
            found = [delta.logprob for delta in deltas if delta.logprob is not None]
            logprobs = self.texts.completion_logprobs(
                [] if self.is_scored else found, choice.offsets
            )
        if self.body.echo and not choice.sent:
            text = choice.echo + text
            if logprobs is not None:
                before = self._of_prompt(choice, deltas[0].prompt_logprobs or ())
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        if logprobs is not None and self.body.chat_logprobs and not self.is_scored:
            logprobs["content"] = self.texts.chat_logprobs(deltas)["content"]
        reason = None
        if finish is not None:
            reason = "length" if self.is_scored else FINISH[finish]
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _of_prompt(self, choice: Choice, found: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        # Ids of special tokens are echoed as names. An encoded string has none but its prefix.
        is_text = isinstance(self.body.prompt, str) or isinstance(self.body.prompt[0], str)
        offsets = Offsets(self._server.prompts.tokenizer.stream(skip_special=is_text))
        return self.texts.completion_logprobs([choice.prompt[0], *found], offsets)


async def chat(server: Server, body: ChatRequest, state: Any) -> Response:
    """Answer POST /v1/chat/completions."""
    server.check_model(body.model)
    jobs = await jobs_of_chat(server, body)
    return await ChatAnswer(server, body, jobs, state).response()


async def complete(server: Server, body: CompletionRequest, state: Any) -> Response:
    """Answer POST /v1/completions."""
    server.check_model(body.model)
    given = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Any] = given if several else [given]  # pyright: ignore[reportAssignmentType]
    if len(prompts) * body.n > MOST_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts with n={body.n} are more than {MOST_CHOICES} completions; "
            "divide them among several requests",
            "prompt",
        )
    grammar = await grammar_of_form(server, body)
    jobs: list[Job] = []
    for number, prompt in enumerate(prompts):
        jobs += await _jobs_of_prompt(server, body, prompt, grammar, first=number * body.n)
    return await CompletionAnswer(server, body, jobs, state).response()


async def _jobs_of_prompt(
    server: Server,
    body: CompletionRequest,
    given: str | list[int],
    grammar: GrammarSource | None,
    *,
    first: int,
) -> list[Job]:
    """Return the jobs of a prompt, whose choices have indices from `first` on."""
    prompts, tokenizer = server.prompts, server.prompts.tokenizer
    is_text = isinstance(given, str)
    prompt = await asyncio.to_thread(prompts.of_text, given) if is_text else given
    prompts.check(prompt, "prompt")
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    config = prompts.options(body, prompt, most, body.n)
    if body.logprobs is not None:
        config = config.replace(
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            processed_logprobs=body.processed_logprobs,
        )
    echo = "" if not body.echo else given if is_text else tokenizer.decode(prompt)
    choices = [Choice(first + number, prompt, echo) for number in range(body.n)]
    if body.logprobs is not None:
        for choice in choices:
            stream = tokenizer.stream(skip_special=True, after=prompt)
            choice.offsets = Offsets(stream, len(echo))
    return Job.several(prompt, config, choices, grammar)
