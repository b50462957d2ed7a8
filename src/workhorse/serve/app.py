"""The application: routes, errors and lifetime of the server."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

import workhorse
from workhorse.errors import WorkhorseError
from workhorse.generate.options import served, table
from workhorse.serve import completing, responses
from workhorse.serve.answers import TokenText
from workhorse.serve.engine_client import EngineClient
from workhorse.serve.errors import ApiError, bad_request
from workhorse.serve.gate import Gate, Keys, Limits
from workhorse.serve.generating import Server
from workhorse.serve.messages import ModelFacts
from workhorse.serve.metrics import Metrics
from workhorse.serve.page import page
from workhorse.serve.prompts import Prompts
from workhorse.serve.responses_schema import ResponsesRequest
from workhorse.serve.schema import (
    FIELD,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from workhorse.serve.tools import tools_of

if TYPE_CHECKING:
    from workhorse.serve.grammar import GrammarChecker


def create_app(
    engine: EngineClient,
    facts: ModelFacts,
    *,
    name: str,
    metrics: Metrics,
    keys: Sequence[str],
    limits: Limits,
    loopback: bool,
) -> Gate:
    """Create the server's ASGI application, with an engine that is ready.

    For the other arguments see `run.serve`.
    """
    app = FastAPI(
        title="Workhorse",
        version=workhorse.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,  # behind a proxy for TLS, it would lead to http://
    )
    server = Server(
        name,
        engine,
        Prompts(facts),
        TokenText(facts.tokenizer),
        metrics,
        int(time.time()),
        _checker(),
        tuple(facts.settings.adapters),
    )
    gate = Gate(app, Keys(keys), limits, on_answer=metrics.answered, loopback=loopback and not keys)
    _add_errors(app)
    _add_routes(app, server, facts, gate)
    _add_tokenizing(app, server, facts)
    return gate


def _checker() -> "GrammarChecker | None":
    """Return the checker of grammars; None if llguidance is not installed."""
    if find_spec("llguidance") is None:
        return None
    from workhorse.serve.grammar import GrammarChecker

    return GrammarChecker()


def _add_routes(app: FastAPI, server: Server, facts: ModelFacts, gate: Gate) -> None:
    model: dict[str, Any] = {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "workhorse",
        "parent": None,
        "max_model_len": facts.context,
        "trained_to_chat": facts.trained_to_chat,
        "sampling": {name: table()[name].default or 0 for name in served()} | facts.sampling,
        "stop_tokens": facts.stop_tokens,
        "reply_stop_tokens": facts.reply_stop_tokens,
    }
    of_adapters = [model | {"id": name, "parent": server.name} for name in server.adapters]
    by_name = {one["id"]: one for one in (model, *of_adapters)}
    for_browsers = page()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """Return the page for browsers."""
        return for_browsers

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Say that the process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Say whether requests are accepted."""
        state = "shutting down" if gate.is_draining else server.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures in Prometheus' text format."""
        text = server.metrics.text(server.engine.restarts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model, and its adapters."""
        return {"object": "list", "data": [*by_name.values()]}

    @app.get("/v1/models/{id:path}")
    async def model_by_id(id: str) -> dict[str, Any]:
        """Describe a model."""
        server.check_model(id)
        return by_name[id]

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Reply to a chat."""
        return await completing.chat(server, body, request.state)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await completing.complete(server, body, request.state)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Reply to a chat, with OpenAI's Responses API."""
        return await responses.respond(server, body, request.state)


def _add_tokenizing(app: FastAPI, server: Server, facts: ModelFacts) -> None:
    # A thread of their own, so that many of these requests do not delay prompts.
    in_turn = partial(asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(1))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Encode a text or a chat."""
        server.check_model(body.model)
        return await in_turn(_tokenized, server, body, facts)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Decode token ids."""
        server.check_model(body.model)
        try:
            text = await in_turn(facts.tokenizer.decode, body.tokens)
        except WorkhorseError as error:
            raise bad_request(str(error), "tokens") from None
        return {"content": text, "prompt": text}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Describe the tokenizer, for lm-eval's remote tokenizer."""
        roles = facts.tokenizer.roles
        named = {f"{role}_token": roles.get(role) for role in ("bos", "eos", "pad", "unk")}
        template = facts.tokenizer.chat_templates.get(facts.settings.template)
        return {**named, "chat_template": template}


def _tokenized(server: Server, body: TokenizeRequest, facts: ModelFacts) -> dict[str, Any]:
    try:
        if body.messages is not None:
            tokens = server.prompts.of_chat(body.messages, tools_of(body.tools))
        elif body.prompt is not None and body.add_special_tokens:
            tokens = server.prompts.of_text(body.prompt)
        elif body.prompt is not None:
            tokens = facts.tokenizer.encode(body.prompt, allow_special=True)
        else:
            tokens = facts.tokenizer.encode(body.content or "")
    except WorkhorseError as error:
        raise bad_request(str(error), "content") from None
    return {"tokens": tokens, "count": len(tokens), "max_model_len": facts.context}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def of_api(request: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> Response:
        return _validation(error).response

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, _http_message(request, error)).response


def _validation(error: RequestValidationError) -> ApiError:
    """Return the first problem that pydantic found: in a union, of the branch that fits best."""
    problems = error.errors()
    stem = tuple(takewhile(lambda part: not _is_branch(part), problems[0]["loc"]))
    alike = [one for one in problems if one["loc"][: len(stem)] == stem]
    problem = max(alike, key=lambda one: len(one["loc"]))
    where = [part for part in problem["loc"][1:] if not _is_branch(part)]
    where += [problem["ctx"][FIELD]] if FIELD in problem.get("ctx", {}) else []
    param = ".".join(map(str, where)) or None
    in_field = not any(isinstance(part, str) for part in where[1:])
    if where and where[0] in ONE_OF and in_field and problem["type"] not in NAMED:
        return bad_request(ONE_OF[where[0]], where[0])
    match problem["type"]:
        case "json_invalid":
            fault, place = problem["ctx"]["error"], problem["loc"][-1]
            return bad_request(f"the body is not JSON: {fault} at character {place}; correct it")
        case "model_attributes_type":
            return bad_request(f"{param or 'the body'} is not a JSON object; give one", param)
        case "extra_forbidden":
            remedy = f"use {INSTEAD[param]}" if param in INSTEAD else "omit it"
            return bad_request(f"{param} is not a field of this request; {remedy}", param)
        case "missing":
            return bad_request(f"{param or 'the body'} is missing; add it", param)
        case kind:
            message, code = str(problem["msg"]), kind if kind == "not_served" else None
            named = param is None or FIELD in problem.get("ctx", {})
            return bad_request(message if named else f"{param}: {message}", param, code)


ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
INSTEAD = {
    "enable_thinking": "chat_template_kwargs or reasoning_effort",
    "guided_json": "response_format or structured_outputs",
    "guided_regex": "structured_outputs",
    "max_output_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_tokens, or max_output_tokens in /v1/responses",
    "max_tokens": "max_output_tokens",
    "response_format": "structured_outputs, or text.format in /v1/responses",
}
"""The field to use, for fields of other routes and of other servers."""
ONE_OF = {
    "prompt": "prompt is not a string, a list of strings, a list of token ids, or a list of such "
    "lists; give one of them",
    "input": "input is not a string or a list of 1 to 20,000 items; give one of them",
    "stop": "stop is not a string or a list of up to 16 strings of 1 to 1,024 characters; give one "
    "of them",
}
"""Messages for fields with several types. pydantic would only describe the first type."""
NAMED = ("missing", "not_served")
"""Problems that such fields share with all others."""


def _is_branch(part: object) -> bool:
    """True for the name of a union's branch in the location of a problem."""
    return isinstance(part, str) and ("[" in part or part in ("str", "constrained-str", "TextPart"))


def _http_message(request: Request, error: HTTPException) -> str:
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            path = request.url.path.rstrip("/")
            known = next((one for one in ROUTES if path.endswith(one.removeprefix("/v1"))), None)
            return f"{request.url.path} does not exist; use {known or '/openapi.json for a list'}"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return f"{request.url.path} does not answer {request.method}; see /openapi.json"
        case HTTPStatus.BAD_REQUEST:  # FastAPI's, for other errors of `json.loads`
            return (
                "the body cannot be read: it is nested too deeply, is not UTF-8, or a number has "
                "more than 4,300 digits; correct it"
            )
        case _:
            return str(error.detail)
