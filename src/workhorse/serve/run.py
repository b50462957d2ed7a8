"""Run the server: start the engine, listen, and end without losing requests in flight."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from workhorse.errors import WorkhorseError, counted
from workhorse.serve.app import create_app
from workhorse.serve.engine_client import COMMAND, EngineClient
from workhorse.serve.gate import Gate, Limits, is_loopback
from workhorse.serve.messages import ModelFacts
from workhorse.serve.metrics import Metrics
from workhorse.serve.settings import EngineSettings

GRACE = 600.0
"""Seconds that requests in flight may take after a signal."""
TO_TELL = 5.0
"""Seconds to answer the clients of dropped requests."""
PROXIES = "FORWARDED_ALLOW_IPS"
"""uvicorn's environment variable: addresses of proxies whose `X-Forwarded-For` is trusted. If it is
not set, uvicorn would trust all programs on this machine."""
SHORTEST_KEY = 8
LARGEST_FILE = 1 << 20
"""Maximum size of a file with keys in bytes."""


def read_keys(file: Path) -> list[str]:
    """Read API keys, one per line; empty lines and lines that begin with # are ignored.

    Raises:
        WorkhorseError: the file has no key.
    """
    from workhorse.files.text_formats import read_text

    lines = [line.strip() for line in read_text(file, limit=LARGEST_FILE).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise WorkhorseError(f"{file} has no key; write one key per line")
    return keys


def check_keys(keys: Sequence[str], host: str) -> None:
    """Check that keys are not guessable, and that only this machine can connect without one.

    Raises:
        WorkhorseError: a key is short or not ASCII, or a key is needed.
    """
    for key in keys:
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise WorkhorseError(
                f"an API key has {len(key)} characters or is not ASCII; use {SHORTEST_KEY} or more "
                "printable ASCII characters without spaces"
            )
    if not keys and not is_loopback(host):
        raise WorkhorseError(
            f"--host {host} is reachable from other machines; add --api-key-file FILE, or use "
            "127.0.0.1"
        )


def parsed_adapters(given: Sequence[str], base: str) -> tuple[str | None, dict[str, str]]:
    """Return the path of the adapter that has no name, and the paths of the others by name.

    Args:
        given: values of `--adapter`: `PATH` or `NAME=PATH`. A value that exists is a path.
        base: name of the model for clients.

    Raises:
        WorkhorseError: a name or a path is empty, a name is not unique, or an adapter has no name
            and is not the only one.
    """
    named: dict[str, str] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or Path(one).exists():
            if not one:
                raise WorkhorseError("--adapter is empty; give PATH or NAME=PATH")
            if len(given) > 1:
                raise WorkhorseError(
                    f"--adapter {one} has no name and is not the only one; give NAME={one}"
                )
            return one, {}
        if not name.strip() or not path:
            raise WorkhorseError(f"--adapter {one} has an empty name or path; give NAME=PATH")
        if name == base or name in named:
            raise WorkhorseError(
                f"--adapter {one}: the name {name!r} is already in use; choose another name"
            )
        named[name] = path
    return None, named


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded, so that a wrong address is reported at once.

    Raises:
        WorkhorseError: the address is not available.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(*info[:3])  # with its protocol: asyncio sets TCP_NODELAY only then
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(info[4])
    except (OSError, OverflowError, UnicodeError) as error:
        raise WorkhorseError(
            f"cannot listen on {host}:{port} ({error}); choose another --host or --port"
        ) from None
    return bound


class _Uvicorn(uvicorn.Server):
    """A server whose signals are handled by `serve`."""

    def __init__(self, gate: Gate) -> None:
        config = uvicorn.Config(
            gate,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            proxy_headers=PROXIES in os.environ,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)

    def capture_signals(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return contextlib.nullcontext()


async def serve(
    settings: EngineSettings,
    bound: socket.socket,
    *,
    name: str,
    keys: Sequence[str] = (),
    limits: Limits,
    loopback: bool,
    say: Callable[[str], object],
    on_ready: Callable[[ModelFacts], object] = lambda facts: None,
    command: Sequence[str] = COMMAND,
) -> int:
    """Serve a model until a signal arrives.

    At the first SIGTERM or SIGINT no more requests are accepted, and requests in flight end, for up
    to `GRACE` seconds. At the second one they are dropped.

    Args:
        settings: settings of the engine.
        bound: the socket, see `listen`.
        name: name of the model for clients.
        keys: the API keys.
        limits: limits of requests.
        loopback: see `Gate`.
        say: called with each message for the operator.
        on_ready: called when the model is loaded.
        command: command of the engine's process, for tests.

    Returns:
        The number of the signal.

    Raises:
        WorkhorseError: the model cannot be loaded.
    """
    metrics = Metrics()
    engine = EngineClient(settings, say=say, on_step=metrics.stepped, command=command)
    received: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, int(number))
    starting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(received.get())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            say("stopped before the model was loaded")
            return stopping.result()
        facts = starting.result()
        gate = create_app(
            engine, facts, name=name, metrics=metrics, keys=keys, limits=limits, loopback=loopback
        )
        server = _Uvicorn(gate)
        running = asyncio.create_task(server.serve(sockets=[bound]))
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        on_ready(facts)
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        code = await stopping
        await _drain(gate, engine, received, say)
        server.should_exit = server.force_exit = True
        await running
        return code
    finally:
        for task in (starting, stopping):
            task.cancel()
        await engine.close()


async def _drain(
    gate: Gate,
    engine: EngineClient,
    received: asyncio.Queue[int],
    say: Callable[[str], object],
) -> None:
    """Wait until the requests in flight have ended, the time is over, or another signal arrives.

    Then the remaining ones are ended with an error.
    """
    gate.is_draining = True
    if left := gate.running.total():
        say(f"shutting down after {counted(left, 'request')}; a second signal drops them")

    async def ended() -> None:
        while gate.running.total():
            await asyncio.sleep(0.05)

    waiting = [asyncio.create_task(ended()), asyncio.create_task(received.get())]
    await asyncio.wait(waiting, timeout=GRACE, return_when=asyncio.FIRST_COMPLETED)
    if left := gate.running.total():
        say(f"dropped {counted(left, 'request')}")
        await engine.close()
        await asyncio.wait(waiting[:1], timeout=TO_TELL)
    for task in waiting:
        task.cancel()
