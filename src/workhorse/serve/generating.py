"""The parts that all generating routes share: jobs, the tokens of each step, errors, grammars."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import Response, StreamingResponse

from workhorse.generate import Delta, GenerationConfig
from workhorse.serve.answers import Offsets, Timings, TokenText, merged
from workhorse.serve.engine_client import EngineClient, EngineDied, JobFailed
from workhorse.serve.errors import ApiError, bad_request, engine_died, shutting_down
from workhorse.serve.messages import GrammarSource
from workhorse.serve.metrics import Metrics
from workhorse.serve.prompts import Prompts
from workhorse.serve.schema import ChatRequest, Sampling, StructuredOutputs
from workhorse.serve.tools import Tools, grammar_of, grammar_of_content, tools_of
from workhorse.tokenizers.chat.reply_format import ReplyFormat
from workhorse.tokenizers.chat.reply_reader import Piece, ReplyReader

if TYPE_CHECKING:
    from workhorse.serve.grammar import GrammarChecker

PLAIN = ReplyFormat()
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
    adapters: tuple[str, ...] = ()
    """Names of the adapters, which are models for clients."""

    def check_model(self, given: str | None) -> None:
        """Check that a request asks for the model that is served, or one of its adapters.

        Raises:
            ApiError: it asks for another one.
        """
        if given is not None and given not in (self.name, *self.adapters):
            names = " or ".join(map(repr, (self.name, *self.adapters)))
            raise ApiError(
                404,
                f"the model {given[:80]!r} is not served; use {names}",
                param="model",
                code="model_not_found",
            )


@dataclass
class Choice:
    """One completion of a request, while it is generated."""

    index: int
    prompt: list[int]
    echo: str = ""
    """The text of the prompt, if it belongs to the answer."""
    sent: bool = False
    """True if a part has been sent."""
    reader: ReplyReader | None = None
    """Divides a chat's reply into its parts; None if the reply is only text."""
    calls: int = 0
    """Number of tool calls that have been sent."""
    reasoning: int = 0
    """Number of tokens of reasoning that have been read."""
    unread: int = 0
    """Number of tokens whose part is not certain yet."""
    offsets: Offsets | None = None
    """Counts the characters before the next new token, if log-probabilities are asked for."""

    def read(self, deltas: Sequence[Delta]) -> list[Piece]:
        """Return the parts of a chat's reply that new tokens complete."""
        if self.reader is None:
            text = "".join(delta.text for delta in deltas)
            return [Piece("text", text)] if text else []
        pieces: list[Piece] = []
        for delta in deltas:
            found = self.reader.read(delta.text, ended=delta.finish_reason is not None)
            self.unread += 1
            for piece in found:
                self.reasoning += self.unread if piece.kind == "reasoning" else 0
                self.unread = 0
            pieces += found
        return pieces


@dataclass
class Job:
    """A prompt for the engine, and the choices that its completions become.

    Greedy completions of a prompt are equal, so they are one completion with several choices.
    """

    prompt: list[int]
    config: GenerationConfig
    choices: list[Choice]
    grammar: GrammarSource | None = None
    repeated: bool = False
    """True if an earlier job of the request has the same prompt."""

    @classmethod
    def several(
        cls,
        prompt: list[int],
        config: GenerationConfig,
        choices: list[Choice],
        grammar: GrammarSource | None,
    ) -> "list[Job]":
        """Return the jobs of a prompt. With a grammar, each sample is a job with its own state."""
        if not grammar or config.n_samples == 1:
            return [cls(prompt, config, choices, grammar)]
        one, seed = config.replace(n_samples=1), config.seed or 0
        return [
            cls(prompt, one.replace(seed=seed + n), [choice], grammar, repeated=n > 0)
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
        state: the state of the request, with the name of the client. `failure` is added, for errors
            that end a stream.

    Attributes:
        model: name of the model that answers.
    """

    def __init__(self, server: Server, body: Request, jobs: list[Job], state: Any) -> None:
        self.body = body
        self.texts = server.texts
        self._server = server
        self._jobs = jobs
        self._client: str = state.client
        self._adapter = body.model if body.model in server.adapters else None
        self.model = self._adapter or server.name
        self._timings = Timings(sum(len(job.prompt) for job in jobs if not job.repeated))
        state.failure = self.failure

    @abstractmethod
    async def _whole(self, steps: Steps) -> Response:
        """Return the whole answer."""

    def beginning(self) -> Iterable[bytes]:
        """Return the first events of a stream."""
        return ()

    @abstractmethod
    def events(self, choice: Choice, deltas: list[Delta]) -> Iterable[bytes]:
        """Return the events for new tokens of a choice."""

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """Return the last events of a stream that succeeds."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""

    def counted(self, deltas: list[Delta]) -> list[Delta]:
        """Return the tokens that belong to the answer."""
        return deltas

    @property
    def reasoning(self) -> int:
        """Number of tokens of reasoning so far."""
        return sum(choice.reasoning for job in self._jobs for choice in job.choices)

    async def response(self) -> Response:
        """Generate, and return the answer, whole or as events."""
        steps = self._steps()
        if not self.body.stream:
            async with aclosing(steps):
                return await self._whole(steps)
        first = await anext(steps)  # a stream that cannot begin is an error with a status
        events = self._stream(first, steps)
        return EventStream(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _stream(
        self, first: tuple[Choice, list[Delta]], steps: Steps
    ) -> AsyncGenerator[bytes]:
        async with aclosing(steps):
            try:
                for one in self.beginning():
                    yield one
                item: tuple[Choice, list[Delta]] | None = first
                while item is not None:
                    for one in self.events(*item):
                        yield one
                    item = await anext(steps, None)
                for one in self.end():
                    yield one
            except ApiError as error:
                yield self.failure(error)

    async def _steps(self) -> Steps:
        """Yield the new tokens of each choice."""
        complete = self._server.engine.complete
        streams = [
            complete(job.prompt, job.config, self._client, job.grammar, self._adapter)
            for job in self._jobs
        ]
        try:
            async with aclosing(merged(streams)) as items:
                async for number, deltas in items:
                    job = self._jobs[number]
                    self._timings.count(self.counted(deltas), repeated=job.repeated)
                    for choice in job.choices:
                        if own := job.of_choice(choice, deltas):
                            self._timings.sent += len(self.counted(own))
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


async def jobs_of_chat(
    server: Server, body: ChatRequest, form: str = "response_format"
) -> list[Job]:
    """Return the jobs that reply to a chat.

    Args:
        server: the objects that the routes share.
        body: the request.
        form: name of the field `response_format` for the client.

    Raises:
        ApiError: a field is wrong, or fields conflict.
    """
    prompts, begun = server.prompts, body.reply_tokens
    tools = tools_of(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    variables = prompts.variables(body)
    prompt = await asyncio.to_thread(prompts.of_chat, body.messages, tools, variables)
    prompts.check(prompt, "messages")
    prompt += begun
    prompts.check(prompt, "reply_tokens")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise bad_request("max_tokens is 0; choose 1 or more", "max_tokens")
    config = prompts.options(body, prompt, most, body.n)
    if body.logprobs:
        config = config.replace(
            logprobs=body.top_logprobs or 0, processed_logprobs=body.processed_logprobs
        )
    format = await asyncio.to_thread(prompts.format_of_reply, variables)
    if tools is None:
        grammar = await grammar_of_form(server, body, form, format)
    else:
        ends = config.stop_tokens or ()
        grammar = await _grammar_with_tools(server, body, tools, format, ends=ends, form=form)
    if begun and grammar:
        raise bad_request("reply_tokens and a grammar conflict; omit one", "reply_tokens")
    choices = [Choice(index, prompt) for index in range(body.n)]
    if tools is not None or (format.reasoning is not None and body.structured_outputs is None):
        for choice in choices:
            functions = None if tools is None else tools.functions
            must_call = tools is not None and tools.must_call
            choice.reader = ReplyReader(format, functions, only_calls=must_call)
            choice.reader.read(prompts.tokenizer.decode(begun), ended=False)
    return Job.several(prompt, config, choices, grammar)


async def grammar_of_form(
    server: Server, body: Sampling, form: str = "", format: ReplyFormat = PLAIN
) -> GrammarSource | None:
    """Return the grammar of a completion, or of a reply without calls; None: any text.

    Raises:
        ApiError: the grammar cannot be used, or conflicts with another field.
    """
    asked, param = body.structured_outputs, "structured_outputs"
    if isinstance(body, ChatRequest) and (schema := body.content_schema) is not None:
        if asked is not None:
            raise bad_request(f"structured_outputs and {form} conflict; omit one", param)
        asked, param = StructuredOutputs.model_validate({"json": schema}), form
        if format.reasoning is not None:
            text = await _written(
                form, grammar_of_content, schema, format, server.prompts.tokenizer
            )
            asked = StructuredOutputs(grammar=text)
    return None if asked is None else await _checked(server, body, asked, param, format)


async def _grammar_with_tools(
    server: Server,
    body: ChatRequest,
    tools: Tools,
    format: ReplyFormat,
    *,
    ends: Sequence[int],
    form: str,
) -> GrammarSource | None:
    """Return the grammar of a reply that may call tools; None: any text."""
    if body.structured_outputs is not None:
        raise bad_request("structured_outputs and tools conflict; omit one", "structured_outputs")
    schema = body.content_schema
    if schema is None and not tools.needs_grammar:
        return None
    calls = format.calls
    if schema is not None and not tools.must_call and calls is not None and not calls.is_tag:
        raise bad_request(
            f"{form} and tools conflict, since this model writes calls as JSON; omit one", form
        )
    tokenizer = server.prompts.tokenizer
    text = await _written("tools", grammar_of, tools, format, tokenizer, ends, schema)
    return await _checked(server, body, StructuredOutputs(grammar=text), "tools", format)


async def _written(param: str, write: Callable[..., str], *given: Any) -> str:
    """Return the text of a grammar, written in a thread."""
    try:
        return await asyncio.to_thread(write, *given)
    except ValueError as error:
        raise _unusable(str(error), param) from None


def _unusable(reason: str, param: str) -> ApiError:
    return bad_request(f"{param}: the grammar cannot be used: {reason}; change it", param)


async def _checked(
    server: Server, body: Sampling, asked: StructuredOutputs, param: str, format: ReplyFormat
) -> GrammarSource:
    """Return a grammar in llguidance's format."""
    if server.grammars is None:
        raise bad_request(f"{param} is not served without llguidance; omit it", param, "not_served")
    if body.ignore_eos:
        raise bad_request(f"ignore_eos and {param} conflict; omit one", "ignore_eos")
    from workhorse.serve.grammar import source_of

    try:
        source = await asyncio.to_thread(source_of, asked)
        reason = await server.grammars.check(source)
    except ValueError as error:
        reason, source = str(error), ""
    if reason:
        raise _unusable(reason, param)
    end = format.reasoning[1] if format.reasoning else ""
    return GrammarSource(source, tuple(server.prompts.tokenizer.encode(end, allow_special=True)))
