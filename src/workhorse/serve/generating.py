"""The parts that all generating routes share: jobs, the tokens of each step, errors, grammars."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import Response, StreamingResponse

from workhorse.generate import Delta, GenerationConfig
from workhorse.serve.answers import Offsets, Timings, TokenText, merged
from workhorse.serve.engine_client import EngineClient, EngineDied, JobFailed
from workhorse.serve.errors import ApiError, bad_request, engine_died, shutting_down
from workhorse.serve.metrics import Metrics
from workhorse.serve.prompts import Prompts
from workhorse.serve.schema import ResponseFormat, Sampling, StructuredOutputs
from workhorse.serve.tools import Tools, grammar_of
from workhorse.tokenizers.chat.reply_format import ReplyFormat
from workhorse.tokenizers.chat.reply_reader import ReplyReader

if TYPE_CHECKING:
    from workhorse.serve.grammar import GrammarChecker

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

    Attributes:
        model: name of the model that answers.
    """

    def __init__(self, server: Server, body: Request, jobs: list[Job], client: str) -> None:
        self.body = body
        self.texts = server.texts
        self._server = server
        self._jobs = jobs
        self._client = client
        self._adapter = body.model if body.model in server.adapters else None
        self.model = self._adapter or server.name
        self._timings = Timings(prompt=sum(len(job.prompt) for job in jobs))

    @abstractmethod
    async def _whole(self, steps: Steps) -> Response:
        """Return the whole answer."""

    @abstractmethod
    def _events(self, first: tuple[Choice, list[Delta]], steps: Steps) -> AsyncGenerator[bytes]:
        """Yield the events of a stream. An error after its beginning is its last event."""

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
            complete(job.prompt, job.config, self._client, job.grammar, self._adapter)
            for job in self._jobs
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


async def grammar_of_form(
    server: Server, body: Sampling, form: ResponseFormat | None, name: str = "response_format"
) -> str:
    """Return the grammar that a request asks for; empty if it asks for none.

    Args:
        server: the objects that the routes share.
        body: the request.
        form: the form of a reply.
        name: name of the field that has the form.

    Raises:
        ApiError: the grammar cannot be used, or conflicts with another field.
    """
    asked, param = body.structured_outputs, "structured_outputs"
    if (schema := _schema_of(form)) is not None:
        if asked is not None:
            raise bad_request(f"structured_outputs and {name} conflict; omit one", param)
        asked = StructuredOutputs.model_validate({"json": schema})
        param = name
    return "" if asked is None else await _checked(server, body, asked, param)


async def grammar_of_reply(
    server: Server,
    body: Sampling,
    form: ResponseFormat | None,
    tools: Tools | None,
    *,
    format: ReplyFormat,
    ends: Sequence[int],
    name: str = "response_format",
) -> tuple[str, bool]:
    """Return the grammar of a chat's reply, and True if it only allows content.

    Args:
        server: the objects that the routes share.
        body: the request.
        form: the form of the content.
        tools: the tools that the reply may call.
        format: how the model writes replies.
        ends: ids that end a reply.
        name: name of the field that has the form.

    Raises:
        ApiError: see `grammar_of_form`.
    """
    if tools is None:
        grammar = await grammar_of_form(server, body, form, name)
        return grammar, grammar != ""
    if body.structured_outputs is not None:
        raise bad_request("structured_outputs and tools conflict; omit one", "structured_outputs")
    schema = _schema_of(form)
    if schema is None and not tools.needs_grammar:
        return "", False
    calls = format.calls
    if schema is not None and not tools.must_call and calls is not None and not calls.is_tag:
        raise bad_request(
            f"{name} and tools conflict, since this model writes calls as JSON; omit one", name
        )
    text = grammar_of(tools, format, server.prompts.tokenizer, ends, schema)
    return await _checked(server, body, StructuredOutputs(grammar=text), "tools"), False


def reader_of(
    format: ReplyFormat, tools: Tools | None, *, is_structured: bool
) -> ReplyReader | None:
    """Return a reader of a reply; None if the reply is only text.

    Args:
        format: how the model writes replies.
        tools: the tools that the reply may call.
        is_structured: True if a grammar only allows content.
    """
    if is_structured or (tools is None and format.reasoning is None):
        return None
    return ReplyReader(format, None if tools is None else tools.functions)


def _schema_of(form: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema of a form; None if it is text."""
    if form is None or form.type == "text":
        return None
    schema = None if form.json_schema is None else form.json_schema.schema_
    return schema or {"type": "object"}


async def _checked(server: Server, body: Sampling, asked: StructuredOutputs, param: str) -> str:
    """Return a grammar in llguidance's format.

    Raises:
        ApiError: see `grammar_of_form`.
    """
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
