"""Errors in the form of OpenAI's API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

SERVER_ERROR = 500
"""Statuses from this one on are failures of the server."""
CHALLENGES = ('Basic realm="workhorse"', "Bearer")
"""How a client can prove who it is. Chromium reads only the first challenge of a header line, so
each has its own."""
CONTEXT_EXCEEDED = "context_length_exceeded"


class ApiError(Exception):
    """An error that the client gets.

    Args:
        status: the HTTP status.
        message: the fact, the value and the remedy.
        param: the field of the request that is wrong.
        code: a code that programs can test.
        headers: headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        other = "server_error" if self.status >= SERVER_ERROR else "invalid_request_error"
        kind = TYPES.get(self.status, other)
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def response(self) -> JSONResponse:
        answer = JSONResponse(self.body, self.status, self.headers)
        if self.status == HTTPStatus.UNAUTHORIZED:
            for challenge in CHALLENGES:
                answer.headers.append("WWW-Authenticate", challenge)
        return answer


TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""The `type` of an error by its status; others are `invalid_request_error` or `server_error`."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that the client must change."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """The server ends, so it accepts no request and drops those in flight."""
    return ApiError(
        503,
        "the server is shutting down; send the request to another one",
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def engine_died() -> ApiError:
    """The engine died while it worked on this request, or is being restarted."""
    return ApiError(
        503,
        "the engine died and is being restarted; send the request again",
        code="engine_restarting",
        headers={"Retry-After": "5"},
    )
