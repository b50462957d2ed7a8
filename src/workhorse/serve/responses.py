"""The route /v1/responses: OpenAI's Responses API. The server stores nothing."""

import secrets
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from typing import Any

from starlette.responses import JSONResponse, Response

from workhorse.generate import Delta
from workhorse.serve.answers import event
from workhorse.serve.errors import SERVER_ERROR, ApiError, bad_request
from workhorse.serve.generating import Answer, Choice, Job, Server, Steps, jobs_of_chat
from workhorse.serve.responses_schema import ResponsesRequest
from workhorse.tokenizers.chat.reply_reader import Call, Piece

Fields = dict[str, Any]
IN_PROGRESS = "in_progress"
"""Status of an answer or an item that has not ended."""


TEXTS: dict[str, tuple[str, Fields, Fields]] = {
    "text": (
        "msg",
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
}
"""For each kind of text: the beginning of an item's id, fields of the item, and of its content."""


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class Output:
    """The output items of an answer, which pieces of the reply extend.

    The methods yield an event for each change. Events refer to the items, so they must be formatted
    before the next change.
    """

    def __init__(self) -> None:
        self.items: list[Fields] = []
        self._kind: str | None = None
        """The kind of text that the last item has, if more can follow."""
        self._texts: list[str] = []

    def add(self, piece: Piece, logprobs: list[Fields]) -> Iterator[Fields]:
        """Add a piece of the reply, with the log-probabilities of its tokens."""
        if piece.call is not None:
            yield from self.end("completed")
            yield from self._call(piece.call)
            return
        if piece.kind != self._kind:
            yield from self.end("completed")
            yield from self._begin(piece.kind)
        self._texts.append(piece.text)
        (part,) = self.items[-1]["content"]
        fields: Fields = {"delta": piece.text}
        if "logprobs" in part:
            part["logprobs"] += logprobs
            fields["logprobs"] = logprobs
        yield self._of_content(f"response.{part['type']}.delta", fields)

    def end(self, status: str) -> Iterator[Fields]:
        """End the text, if one has begun."""
        if self._kind is not None:
            self.settle(status)
            (part,) = self.items[-1]["content"]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._of_content(f"response.{part['type']}.done", fields)
            yield self._of_content("response.content_part.done", {"part": part})
            yield self._of_item("response.output_item.done")

    def is_unfinished(self, logprobs: list[Fields]) -> bool:
        """True if an answer cannot end here: it has no item, or lacks these log-probabilities."""
        return not self.items or (self._kind == "text" and bool(logprobs))

    def settle(self, status: str) -> None:
        """Set the text and the status of the last item, if more could have followed."""
        if self._kind is not None:
            self.items[-1]["content"][0]["text"] = "".join(self._texts)
            self.items[-1]["status"] = status
            self._kind, self._texts = None, []

    def _begin(self, kind: str) -> Iterator[Fields]:
        prefix, of_item, of_part = deepcopy(TEXTS[kind])
        content: list[Fields] = []
        self.items.append({"id": _id(prefix), "status": IN_PROGRESS, **of_item, "content": content})
        yield self._of_item("response.output_item.added")
        self._kind = kind
        content.append({**of_part, "text": ""})
        yield self._of_content("response.content_part.added", {"part": content[0]})

    def _call(self, call: Call) -> Iterator[Fields]:
        fields = {"id": _id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append({**fields, "arguments": "", "status": IN_PROGRESS})
        yield self._of_item("response.output_item.added")
        kind, arguments = "response.function_call_arguments", {"arguments": call.arguments}
        yield self._of_part(f"{kind}.delta", {"delta": call.arguments})
        yield self._of_part(f"{kind}.done", {"name": call.name, **arguments})
        self.items[-1] |= {"status": "completed", **arguments}
        yield self._of_item("response.output_item.done")

    def _of_item(self, kind: str) -> Fields:
        return {"type": kind, "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _of_content(self, kind: str, fields: Fields) -> Fields:
        return self._of_part(kind, {"content_index": 0, **fields})

    def _of_part(self, kind: str, fields: Fields) -> Fields:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **fields}


class ResponsesAnswer(Answer[ResponsesRequest]):
    """The answer to POST /v1/responses."""

    def __init__(self, server: Server, body: ResponsesRequest, jobs: list[Job], state: Any) -> None:
        super().__init__(server, body, jobs, state)
        self._output = Output()
        self._numbers = count()
        self._logprobs: list[Fields] = []
        """Log-probabilities of tokens whose text has not been added to the output."""
        self._status = IN_PROGRESS
        config = jobs[0].config
        form: Fields = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_unset=True)
        self._envelope = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "background": False,
            "error": None,
            "frequency_penalty": config.frequency_penalty,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "presence_penalty": config.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": config.temperature,
            "text": {"format": form},
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.numbers().get("top_p", config.top_p),
            "truncation": "disabled",
        }

    def _response(self) -> Fields:
        """Return the answer in its present state."""
        ended = self._status != IN_PROGRESS
        answer = self._envelope | {
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "output": self._output.items,
            "usage": self._usage if ended else None,
        }
        if self._status == "incomplete":
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if ended and self.body.timings:
            answer["timings"] = self._timings.milliseconds
        return answer

    @property
    def _usage(self) -> Fields:
        timings = self._timings
        return {
            "input_tokens": timings.prompt,
            "input_tokens_details": {"cached_tokens": timings.cached, "cache_write_tokens": 0},
            "output_tokens": timings.sent,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": timings.prompt + timings.sent,
        }

    def _read(self, choice: Choice, deltas: list[Delta]) -> Iterator[Fields]:
        """Add new tokens to the output, and yield the events."""
        finish = deltas[-1].finish_reason
        if self.body.has_logprobs:
            self._logprobs += self.texts.chat_logprobs(deltas)["content"]
        pieces = choice.read(deltas)
        if finish is not None and not pieces and self._output.is_unfinished(self._logprobs):
            pieces = [Piece("text", "")]
        for piece in pieces:
            logprobs, self._logprobs = self._logprobs, []
            yield from self._output.add(piece, logprobs)
        if finish is not None:
            self._status = "incomplete" if finish == "length" else "completed"
            yield from self._output.end(self._status)

    async def _whole(self, steps: Steps) -> Response:
        async for item in steps:
            for _ in self._read(*item):
                pass
        return JSONResponse(self._response())

    def beginning(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def events(self, choice: Choice, deltas: list[Delta]) -> Iterator[bytes]:
        return (self._event(**fields) for fields in self._read(choice, deltas))

    def end(self) -> Iterator[bytes]:
        yield self._event(f"response.{self._status}", response=self._response())

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails.

        The event `error` has the fields that OpenAI documents. It repeats them in `error`, as
        OpenAI's servers do, because clients raise an exception if they find that key.
        """
        fields = error.body["error"]
        self._output.settle("incomplete")
        self._status = "failed"
        code = "server_error" if error.status >= SERVER_ERROR else "invalid_prompt"
        failed = self._response() | {"error": {"code": code, "message": error.message}}
        return self._event(**fields | {"type": "error", "error": fields}) + self._event(
            "response.failed", response=failed
        )

    def _event(self, type: str, **fields: Any) -> bytes:
        """Format an event, with its name and its number."""
        numbered = {"type": type, "sequence_number": next(self._numbers), **fields}
        return f"event: {type}\n".encode() + event(numbered)


async def respond(server: Server, body: ResponsesRequest, state: Any) -> Response:
    """Answer POST /v1/responses."""
    server.check_model(body.model)
    try:
        jobs = await jobs_of_chat(server, body.as_chat, "text.format")
    except ApiError as error:
        field = (error.param or "").partition(".")[0]
        param = {"messages": "input", "reasoning_effort": "reasoning.effort"}.get(field)
        raise bad_request(error.message, param or error.param, error.code) from None
    return await ResponsesAnswer(server, body, jobs, state).response()
