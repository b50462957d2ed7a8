"""Checks before any work is done: host, key, size and number of requests; and time limits."""

import asyncio
import contextlib
import hashlib
import hmac
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workhorse.serve.errors import ApiError, shutting_down

OPEN = "/health"
"""The only route that needs no key."""
CLIENT_SHARE = 0.75
"""Fraction of the places for requests that one client may use, so that others find one free."""
RETRY = 1
"""Seconds after which a client may send a refused request again."""
TO_END = 1.0
"""Seconds to send the last event of a stream that took too long."""


@dataclass(frozen=True)
class Limits:
    """Limits of the requests."""

    body_bytes: int = 4 << 20
    """Maximum size of a request's body."""
    body_seconds: float = 30.0
    """Maximum time to receive it."""
    places: int = 32
    """Maximum number of requests that run or wait."""
    seconds: float = 600.0
    """Maximum time of a request."""


class Keys:
    """The API keys. A client is named after the number of its key.

    Args:
        keys: the keys; empty: no key is needed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client(self, header: str) -> str | None:
        """Return the name of the client with this `Authorization` header; None: no valid key.

        The key is a Bearer token, or the password of HTTP Basic, which browsers ask for. All keys
        are compared, in constant time.
        """
        scheme, _, given = header.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = b64decode(given, validate=True).decode("latin-1").partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return f"key {matches.index(True)}" if any(matches) else None


class ClientLeft(Exception):
    """The client has closed the connection before the request was complete."""


class Gate:
    """ASGI middleware that admits requests, and ends them if the client leaves or takes too long.

    The body is read before the application is called. Its task is cancelled if the client closes
    the connection.

    Args:
        app: the application.
        keys: the API keys.
        limits: the limits.
        on_answer: called with the route and the status of each answer.
        loopback: True if the server is bound to a loopback address without keys. The `Host` header
            must then be one too, so that no web page can reach the server by DNS rebinding.

    Attributes:
        running: the number of admitted requests in progress, by client.
        is_draining: True if no more requests are admitted.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        limits: Limits,
        *,
        on_answer: Callable[[str, int], object],
        loopback: bool,
    ) -> None:
        self.app = app
        self.running: Counter[str] = Counter()
        self.is_draining = False
        self._on_answer = on_answer
        self._keys = keys
        self._limits = limits
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        try:
            client = self._client(scope)
            scope["state"] = {**scope.get("state", {}), "client": client}
            if scope["method"] == "HEAD":  # the server omits the body
                scope = {**scope, "method": "GET"}
            with self._place(client) if scope["method"] == "POST" else contextlib.nullcontext():
                body = await self._body(scope, receive)
                await self._run(scope, body, receive, send)
        except ClientLeft:
            return
        except ApiError as error:
            await error.response(scope, receive, self._counting(scope, send))

    def _counting(self, scope: Scope, send: Send) -> Send:
        """Return a function that sends, and reports the status of the answer."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._on_answer(route, message["status"])
            await send(message)

        return counting

    def _client(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        address = (scope.get("client") or ("",))[0]
        if scope["path"] == OPEN:
            return address
        if self._loopback and not is_loopback(_host(headers.get("host", ""))):
            raise ApiError(
                403,
                "the Host header is not a loopback address; use http://localhost, or start the "
                "server with an API key",
                code="forbidden_host",
            )
        if not self._keys:
            return address
        client = self._keys.client(headers.get("authorization", ""))
        if client is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        return client

    @contextlib.contextmanager
    def _place(self, client: str):
        """Take one of the places for requests."""
        if self.is_draining:
            raise shutting_down()
        places = self._limits.places
        own = max(1, int(places * CLIENT_SHARE))
        if self.running.total() >= places or self.running[client] >= own:
            raise ApiError(
                429,
                f"{self.running[client]} of your requests and {self.running.total()} in all run or "
                f"wait, and the limits are {own} and {places}; try again in {RETRY} s",
                code="too_many_requests",
                headers={"Retry-After": str(RETRY)},
            )
        self.running[client] += 1
        try:
            yield
        finally:
            self.running[client] -= 1
            self.running += Counter()  # drops clients without requests

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body."""
        headers = Headers(scope=scope)
        most = self._limits.body_bytes
        length = headers.get("content-length", "0")
        too_large = ApiError(
            413, f"the body is larger than {most:,} bytes; shorten it", code="body_too_large"
        )
        if not (length.isascii() and length.isdigit()) or int(length) > most:
            raise too_large
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(
                    415,
                    f"the content type is {kind!r}; send application/json",
                    code="unsupported_media_type",
                )
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_seconds:g} s; send it faster",
                code="body_timeout",
            ) from None
        return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it ends, the client leaves or the time limit is reached."""
        begun: dict[bytes, bytes] | None = None
        is_whole = False
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        never = asyncio.Event()

        async def replay() -> Message:
            if given:
                return given.pop()
            await never.wait()
            raise AssertionError("the event is never set")

        async def watched(message: Message) -> None:
            nonlocal begun, is_whole
            if message["type"] == "http.response.start":
                begun = dict(message["headers"])
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        async def until_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        counting = self._counting(scope, watched)
        task = asyncio.ensure_future(self.app(scope, replay, counting))
        left = asyncio.ensure_future(until_left())
        try:
            await asyncio.wait(
                {task, left}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            in_time = task.done() or left.done()
        finally:
            for one in (task, left):
                one.cancel()
            await asyncio.wait({task, left})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        if not in_time and not is_whole:
            await self._end_late(scope, begun, send)

    async def _end_late(self, scope: Scope, begun: dict[bytes, bytes] | None, send: Send) -> None:
        """Tell a client that its request took too long.

        Args:
            scope: the request. The state `failure` formats the error as the end of a stream.
            begun: the headers of the answer if it has begun; a stream can then end with the error.
            send: sends the rest of the answer.
        """
        error = ApiError(
            504,
            f"the request took longer than {self._limits.seconds:g} s; reduce max_tokens",
            code="timeout",
        )
        if begun is None:
            raise error
        if begun.get(b"content-type", b"").startswith(b"text/event-stream"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TO_END):  # the client may not read
                    last = scope["state"]["failure"](error)
                    await send({"type": "http.response.body", "body": last, "more_body": False})


def is_loopback(host: str) -> bool:
    """True if a host name or address is one of this machine only."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """Return the host of a `Host` header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
