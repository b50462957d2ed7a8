"""A small HTTP client on sockets, which can leave at any moment and read slowly."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

SERVER = Path(__file__).parent / "fake_server.py"


class Reply(NamedTuple):
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self) -> list:
        """The events of a stream, without the last one, `[DONE]`."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def fake_server(step: float = 0.002, **settings) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server with the engine of `fake_engine.py`; yields its address and its process."""
    command = [
        sys.executable,
        str(SERVER),
        *(f"{name}={value}" for name, value in settings.items()),
    ]
    environment = {**os.environ, "STEP_SECONDS": str(step)}
    # A file, because a pipe that nobody reads would stop the server when it is full.
    with (
        tempfile.TemporaryFile("a+") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as process,
    ):
        process.stderr = said
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, said_by(process)
            yield address, process
        finally:
            process.kill()


def said_by(process: subprocess.Popen) -> str:
    """Return the messages of a server of `fake_server` so far."""
    assert process.stderr is not None
    process.stderr.seek(0)
    return process.stderr.read()


def encoded(method: str, path: str, body: object = None, headers: dict | None = None) -> bytes:
    """Format a request."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Length": str(len(data))}
    if data:
        fields["Content-Type"] = "application/json"
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**fields, **(headers or {})}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status and the headers of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value for name, _, value in pairs}


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read an answer."""
    status, headers = await read_head(reader)
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Reply(status, headers, b"".join([piece async for piece in read_chunks(reader)]))


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the parts of a chunked body as they arrive."""
    while size := int((await reader.readline()) or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(address)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def left(writer: asyncio.StreamWriter) -> None:
    """Close a connection."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def ask(
    address: str, method: str, path: str, body: object = None, headers: dict | None = None
) -> Reply:
    """Send a request on a connection of its own, and return the answer."""
    reader, writer = await connect(address)
    try:
        writer.write(encoded(method, path, body, headers))
        return await read_reply(reader)
    finally:
        await left(writer)


def completion(prompt: str = "abc", new: int = 8, **fields) -> dict:
    """The body of a request for a completion."""
    return {"model": "fake", "prompt": prompt, "max_tokens": new, **fields}
