"""The routes that generate: /v1/chat/completions and /v1/completions."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse

from workhorse.generate import Delta, GenerationConfig, TokenLogprob
from workhorse.serve.answers import DONE, FINISH, Offsets, Timings, TokenText, event, merged
from workhorse.serve.engine_client import EngineClient, EngineDied, JobFailed
from workhorse.serve.errors import ApiError, bad_request, engine_died, shutting_down
from workhorse.serve.metrics import Metrics
from workhorse.serve.prompts import Prompts, check_model
from workhorse.serve.schema import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    Sampling,
    StructuredOutputs,
)

if TYPE_CHECKING:
    from workhorse.serve.grammar import GrammarChecker

MOST_CHOICES = 128
"""Maximum number of completions of a request."""
SHORT = 16
"""Default of `max_tokens` for completions, as in OpenAI's API."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream: proxies must pass events on at once."""


@dataclass
class Server:
    """The objects that the routes share."""

    name: str
    """Name of the model."""
    engine: EngineClient
    prompts: Prompts
    texts: TokenText
    metrics: Metrics
    created: int
    """Unix time at which the server started."""
    grammars: "GrammarChecker | None"
    """Compiles grammars; None if llguidance is not installed."""


@dataclass
class Choice:
    """One completion of a request, while it is generated."""

    index: int
    prompt: list[int]
    echo: str = ""
    """The text of the prompt, if it belongs to the answer."""
    sent: bool = False
    """True if a part has been sent."""
    offsets: Offsets | None = None
    """Counts the characters before the next new token, if log-probabilities are asked for."""


@dataclass
class Job:
    """A prompt for the engine, and the choices that its completions become.

    Greedy completions of a prompt are equal, so they are one completion with several choices.
    """

    prompt: list[int]
    config: GenerationConfig
    choices: list[Choice]
    grammar: str = ""

    @classmethod
    def several(
        cls, prompt: list[int], config: GenerationConfig, choices: list[Choice], grammar: str
    ) -> "list[Job]":
        """Return the jobs of a prompt. With a grammar, each sample is a job with its own state."""
        if not grammar or config.n_samples == 1:
            return [cls(prompt, config, choices, grammar)]
        return [
            cls(prompt, config.replace(n_samples=1, seed=(config.seed or 0) + n), [choice], grammar)
            for n, choice in enumerate(choices)
        ]

    def of_choice(self, choice: Choice, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the new tokens of one of the choices."""
        first = self.choices[0].index
        number = choice.index - first if self.config.n_samples > 1 else 0
        return [delta for delta in deltas if delta.index == number]


Steps = AsyncGenerator[tuple[Choice, list[Delta]]]
Request = TypeVar("Request", bound=Sampling)


class EventStream(StreamingResponse):
    """A stream that closes its generator, also if the client leaves."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        events: Any = self.body_iterator
        async with aclosing(events):
            await super().__call__(scope, receive, send)


class Answer(ABC, Generic[Request]):
    """The answer to a request that generates.

    Args:
        server: the objects that the routes share.
        body: the request.
        jobs: the prompts to complete.
        client: name of the client.
    """

    kind: str
    """`object` of the whole answer."""
    kind_of_part: str
    """`object` of an event of the stream."""
    prefix: str
    """Beginning of the answer's id."""

    def __init__(self, server: Server, body: Request, jobs: list[Job], client: str) -> None:
        self.body = body
        self.texts = server.texts
        self._server = server
        self._jobs = jobs
        self._client = client
        self._timings = Timings(prompt=sum(len(job.prompt) for job in jobs))
        self._envelope = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": server.name,
        }

    @abstractmethod
    def part(self, choice: Choice, deltas: Sequence[Delta], *, whole: bool) -> dict[str, Any]:
        """Format new tokens of a choice; the complete choice if `whole`."""

    def counted(self, deltas: list[Delta]) -> list[Delta]:
        """Return the tokens that belong to the answer."""
        return deltas

    async def response(self) -> Response:
        """Generate, and return the answer, whole or as events."""
        steps = self._steps()
        if not self.body.stream:
            async with aclosing(steps):
                return await self._whole(steps)
        first = await anext(steps)  # a stream that cannot begin is an error with a status
        events = self._events(first, steps)
        return EventStream(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _steps(self) -> Steps:
        """Yield the new tokens of each choice.

        Raises:
            ApiError: the engine died, refused a job, or failed.
        """
        complete = self._server.engine.complete
        streams = [
            complete(job.prompt, job.config, self._client, job.grammar) for job in self._jobs
        ]
        try:
            async with aclosing(merged(streams)) as items:
                async for number, deltas in items:
                    job = self._jobs[number]
                    self._timings.count(self.counted(deltas))
                    for choice in job.choices:
                        if own := job.of_choice(choice, deltas):
                            yield choice, own
        except EngineDied:
            closed = self._server.engine.state == "closed"
            raise shutting_down() if closed else engine_died() from None
        except JobFailed as error:
            if error.is_input:
                raise bad_request(str(error)) from None
            raise ApiError(500, f"the engine failed: {error}", code="engine_failed") from None
        finally:
            self._server.metrics.generated(self._timings)

    async def _whole(self, steps: Steps) -> Response:
        collected: dict[int, list[Delta]] = {}
        async for choice, deltas in steps:
            collected.setdefault(choice.index, []).extend(deltas)
        choices = [choice for job in self._jobs for choice in job.choices]
        parts = [self.part(choice, collected[choice.index], whole=True) for choice in choices]
        answer = self._envelope | {"choices": parts, "usage": self._timings.usage}
        if self.body.timings:
            answer["timings"] = self._timings.milliseconds
        return JSONResponse(answer)

    async def _events(
        self, first: tuple[Choice, list[Delta]], steps: Steps
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a stream. An error after its beginning is its last event."""
        envelope = self._envelope | {"object": self.kind_of_part}
        asked = self.body.stream_options
        with_usage = asked is not None and asked.include_usage
        extra = {"usage": None} if with_usage else {}
        async with aclosing(steps):
            try:
                item: tuple[Choice, list[Delta]] | None = first
                while item is not None:
                    choice, deltas = item
                    fields = self.part(choice, deltas, whole=False)
                    if not choice.sent or _says_anything(fields):
                        choice.sent = True
                        yield event(envelope | {"choices": [fields]} | extra)
                    item = await anext(steps, None)
                last: dict[str, Any] = {"usage": self._timings.usage} if with_usage else {}
                if self.body.timings:
                    last["timings"] = self._timings.milliseconds
                if last:
                    yield event(envelope | {"choices": []} | last)
            except ApiError as error:
                yield event(error.body)
        yield DONE


def _says_anything(fields: dict[str, Any]) -> bool:
    """False for a part without text, log-probabilities and end, such as half a character."""
    text = fields["text"] if "text" in fields else fields["delta"]["content"]
    return bool(text or fields["logprobs"] or fields["finish_reason"])


class ChatAnswer(Answer[ChatRequest]):
    """The answer to POST /v1/chat/completions."""

    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"
    prefix = "chatcmpl"

    def part(self, choice: Choice, deltas: Sequence[Delta], *, whole: bool) -> dict[str, Any]:
        text, finish = "".join(delta.text for delta in deltas), deltas[-1].finish_reason
        found = [delta.logprob for delta in deltas if delta.logprob is not None]
        logprobs = self.texts.of_chat(found) if self.body.logprobs else None
        reason = None if finish is None else FINISH[finish]
        fields = {"index": choice.index, "logprobs": logprobs, "finish_reason": reason}
        if whole:
            message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
            return fields | {"message": message}
        role = {} if choice.sent else {"role": "assistant"}
        return fields | {"delta": {**role, "content": text}}


class CompletionAnswer(Answer[CompletionRequest]):
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
        found = [delta.logprob for delta in deltas if delta.logprob is not None]
        logprobs = None
        if choice.offsets is not None:
            logprobs = self.texts.of_completion([] if self.is_scored else found, choice.offsets)
        if self.body.echo and not choice.sent:
            text = choice.echo + text
            if logprobs is not None:
                before = self._of_prompt(choice, deltas[0].prompt_logprobs or ())
                logprobs = {name: before[name] + values for name, values in logprobs.items()}
        if logprobs is not None and self.body.chat_logprobs and not self.is_scored:
            logprobs["content"] = self.texts.of_chat(found)["content"]
        reason = None
        if finish is not None:
            reason = "length" if self.is_scored else FINISH[finish]
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _of_prompt(self, choice: Choice, found: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        # Ids of special tokens are echoed as names. An encoded string has none but its prefix.
        is_text = isinstance(self.body.prompt, str) or isinstance(self.body.prompt[0], str)
        offsets = Offsets(self._server.prompts.tokenizer.stream(skip_special=is_text))
        return self.texts.of_completion([choice.prompt[0], *found], offsets)


async def chat(server: Server, body: ChatRequest, client: str) -> Response:
    """Answer POST /v1/chat/completions."""
    check_model(server.name, body.model)
    prompt = await asyncio.to_thread(server.prompts.of_chat, body.messages)
    server.prompts.check(prompt, "messages")
    prompt += body.reply_tokens
    server.prompts.check(prompt, "reply_tokens" if body.reply_tokens else "messages")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise bad_request("max_tokens is 0; choose 1 or more", "max_tokens")
    config = server.prompts.options(body, prompt, most)
    if body.logprobs:
        config = config.replace(logprobs=body.top_logprobs or 0)
    choices = [Choice(index, prompt) for index in range(body.n)]
    grammar = await _grammar(server, body, body.response_format)
    jobs = Job.several(prompt, config, choices, grammar)
    return await ChatAnswer(server, body, jobs, client).response()


async def complete(server: Server, body: CompletionRequest, client: str) -> Response:
    """Answer POST /v1/completions."""
    check_model(server.name, body.model)
    given = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Any] = given if several else [given]  # pyright: ignore[reportAssignmentType]
    if len(prompts) * body.n > MOST_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts with n={body.n} are more than {MOST_CHOICES} completions; "
            "divide them among several requests",
            "prompt",
        )
    grammar = await _grammar(server, body, None)
    jobs: list[Job] = []
    for number, one in enumerate(prompts):
        prompt = one
        if isinstance(one, str):
            prompt = await asyncio.to_thread(server.prompts.of_text, one)
        server.prompts.check(prompt, "prompt")
        config = server.prompts.options(
            body, prompt, SHORT if body.max_tokens is None else body.max_tokens
        )
        if body.logprobs is not None:
            of_prompt = body.logprobs if body.echo else None
            config = config.replace(logprobs=body.logprobs, prompt_logprobs=of_prompt)
        echo = ""
        if body.echo:
            echo = one if isinstance(one, str) else server.prompts.tokenizer.decode(prompt)
        choices: list[Choice] = []
        for index in range(number * body.n, (number + 1) * body.n):
            choices.append(Choice(index, prompt, echo))
            if body.logprobs is not None:
                stream = server.prompts.tokenizer.stream(skip_special=True, after=prompt)
                choices[-1].offsets = Offsets(stream, len(echo))
        jobs += Job.several(prompt, config, choices, grammar)
    return await CompletionAnswer(server, body, jobs, client).response()


async def _grammar(server: Server, body: Sampling, form: ResponseFormat | None) -> str:
    """Return the grammar that a request asks for; empty if it asks for none.

    Raises:
        ApiError: the grammar cannot be used, or conflicts with another field.
    """
    asked, param = body.structured_outputs, "structured_outputs"
    if form is not None and form.type != "text":
        if asked is not None:
            raise bad_request("structured_outputs and response_format conflict; omit one", param)
        schema = None if form.json_schema is None else form.json_schema.schema_
        asked = StructuredOutputs.model_validate({"json": schema or {"type": "object"}})
        param = "response_format"
    if asked is None:
        return ""
    if server.grammars is None:
        raise bad_request(f"{param} is not served without llguidance; omit it", param, "not_served")
    if body.ignore_eos:
        raise bad_request(f"ignore_eos and {param} conflict; omit one", "ignore_eos")
    from workhorse.serve.grammar import source_of

    try:
        source = source_of(asked)
        reason = await server.grammars.check(source)
    except ValueError as error:
        reason, source = str(error), ""
    if reason:
        raise bad_request(f"{param}: the grammar cannot be used: {reason}; change it", param)
    return source
