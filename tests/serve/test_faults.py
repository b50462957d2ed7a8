"""What clients see when the engine dies, the server ends, or other clients misbehave."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.serve.conftest import EVENT, in_threads
from tests.serve.fake_engine import make
from tests.serve.raw import (
    SERVER,
    ask,
    completion,
    connect,
    encoded,
    fake_server,
    left,
    read_chunks,
    read_head,
    read_reply,
    said_by,
)
from workhorse.serve.gate import Gate, Keys, Limits
from workhorse.serve.settings import EngineSettings

ROUTE = "/v1/completions"


async def figure(address: str, name: str, headers=None) -> float:
    text = (await ask(address, "GET", "/metrics", headers=headers)).body.decode()
    return float(re.findall(rf"^workhorse_{name} (.*)$", text, re.MULTILINE)[0])


async def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "the condition does not hold in time"
        await asyncio.sleep(0.01)


async def in_flight(address: str, count: int, headers=None) -> bool:
    """True if `count` completions run or wait. Tests wait for this, not for a time."""
    names = ("running_completions", "waiting_completions")
    return sum([await figure(address, name, headers) for name in names]) == count


async def is_empty(address: str) -> bool:
    names = ("running_completions", "waiting_completions", "cache_used_ratio")
    return not any([await figure(address, name) for name in names])


@pytest.fixture(scope="module")
def address():
    with fake_server(max_sequences=4, places=8) as (address, _):
        yield address


def test_a_request_that_fails_fails_alone(address):
    async def main():
        good, bad = completion(new=40), completion("!", new=40)
        replies = await asyncio.gather(
            *(ask(address, "POST", ROUTE, body) for body in (good, bad, good))
        )
        assert [reply.status for reply in replies] == [200, 500, 200]
        assert replies[0].json["choices"][0]["text"] == ("abc" * 14)[:40]
        assert replies[1].json["error"]["code"] == "engine_failed"
        failed = await ask(address, "POST", ROUTE, {**bad, "stream": True})
        assert failed.status == 500  # the stream had not begun

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(address, stream):
    async def main():
        for wait in (0.0, 0.02):  # before and after the first token
            reader, writer = await connect(address)
            writer.write(encoded("POST", ROUTE, completion("a" * 300, 3500, stream=stream)))
            await until(lambda: in_flight(address, 1))
            if stream and wait:
                await read_head(reader)
            await asyncio.sleep(wait)
            await left(writer)
            await until(lambda: is_empty(address), seconds=5)  # all tokens take 7 seconds

    asyncio.run(main())


def test_an_answer_is_sent_at_once(address):
    """Without TCP_NODELAY, the body waits 40 ms for the acknowledgement of the headers."""

    async def main():
        reader, writer = await connect(address)
        seconds = 1.0
        for _ in range(200):  # on a busy machine some take longer
            started = time.monotonic()
            writer.write(encoded("GET", "/health"))
            await read_reply(reader)
            seconds = min(seconds, time.monotonic() - started)
            if seconds < 0.03:
                break
        await left(writer)
        assert seconds < 0.03

    asyncio.run(main())


def test_head_is_get_without_a_body(address):
    async def main():
        reader, writer = await connect(address)
        writer.write(encoded("HEAD", "/v1/models"))
        status, headers = await read_head(reader)
        writer.write(encoded("GET", "/v1/models"))
        reply = await read_reply(reader)
        assert (status, headers["content-length"]) == (200, reply.headers["content-length"])
        await left(writer)

    asyncio.run(main())


def test_a_slow_reader_delays_nobody(address):
    async def main():
        slow = await connect(address)
        slow[1].write(encoded("POST", ROUTE, completion("s", 3000, stream=True, logprobs=None)))
        await read_head(slow[0])
        started = time.monotonic()
        reply = await ask(address, "POST", ROUTE, completion(new=20))
        assert reply.status == 200
        assert time.monotonic() - started < 5
        await left(slow[1])
        await until(lambda: is_empty(address))

    asyncio.run(main())


def test_places_are_limited_and_shared(address):
    """A client may take three quarters of the places; the refusal comes before any work.

    A program on this machine cannot pretend to be several clients.
    """

    async def main():
        names = [{"X-Forwarded-For": f"10.0.0.{number}"} for number in range(7)]
        others = [
            asyncio.create_task(ask(address, "POST", ROUTE, completion(new=600), name))
            for name in names[:6]
        ]
        await until(lambda: in_flight(address, 6))
        for route in (ROUTE, "/tokenize"):
            refused = await ask(address, "POST", route, completion(), names[6])
            assert not any(one.done() for one in others)
            assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_requests")
            assert int(refused.headers["retry-after"]) >= 1
        assert [reply.status for reply in await asyncio.gather(*others)] == [200] * 6
        assert (await ask(address, "POST", ROUTE, completion())).status == 200

    asyncio.run(main())


RESPONSES = "/v1/responses"
RESPONSE = {"model": "fake", "input": "abc", "max_output_tokens": 3000, "stream": True}


def check_failure(stream: bytes, code: str) -> None:
    """Check the events of a stream of /v1/responses that fails."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in events:
        EVENT.validate_python(event)
    *_, error, failed = events
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", code, code)
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["error"]["message"] == error["message"]
    (item,) = response["output"]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert item["content"][0]["text"] == "".join(deltas) != ""
    assert item["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == len(deltas)


def test_a_request_may_not_take_too_long():
    async def main(address):
        reply, begun, response = await asyncio.gather(
            *(ask(address, "POST", ROUTE, completion(new=4000, stream=s)) for s in (False, True)),
            ask(address, "POST", RESPONSES, RESPONSE),
        )
        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        assert begun.events[-1]["error"]["code"] == "timeout"
        check_failure(response.body, "timeout")
        await until(lambda: is_empty(address))
        reader, writer = await connect(address)
        writer.write(encoded("POST", ROUTE, completion())[:-5])  # the rest never arrives
        assert (await read_head(reader))[0] == 408
        await left(writer)

    engine, facts = make(EngineSettings("fake", max_sequences=4))
    limits = Limits(places=8, seconds=3, body_seconds=1)
    with in_threads(engine, facts, name="fake", limits=limits) as address:
        asyncio.run(main(address))


def test_a_whole_answer_is_not_ended_again():
    """An application that sent its answer may still run when the time is over."""
    sent = []

    async def application(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"all"})
        await asyncio.sleep(60)

    async def receive():
        return received.pop() if received else await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    received = [{"type": "http.request", "body": b"{}"}]
    gate = Gate(
        application, Keys([]), Limits(seconds=0.01), on_answer=lambda *_: None, loopback=False
    )
    headers = [(b"content-type", b"application/json")]
    state = {"failure": lambda error: b"late"}
    scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": headers, "state": state}
    asyncio.run(gate(scope, receive, send))
    assert [message["body"] for message in sent[1:]] == [b"all"]


def test_the_engine_is_restarted_and_clients_are_told(address):
    async def is_ready():
        return (await ask(address, "GET", "/ready")).status == 200

    async def main():
        stream = await connect(address)
        stream[1].write(encoded("POST", ROUTE, completion(new=3000, stream=True)))
        await read_head(stream[0])
        waiting = asyncio.create_task(ask(address, "POST", ROUTE, completion(new=3000)))
        reader, writer = await connect(address)
        writer.write(encoded("POST", RESPONSES, RESPONSE))
        await read_head(reader)
        pieces, response = read_chunks(reader), b""
        while b"output_text.delta" not in response:
            response += await anext(pieces)
        await until(lambda: in_flight(address, 3))
        killed = await ask(address, "POST", ROUTE, completion("#"))
        assert killed.status == 503
        told = await waiting
        assert (told.status, told.json["error"]["code"]) == (503, "engine_restarting")
        rest = (await stream[0].readuntil(b"[DONE]")).decode()
        await left(stream[1])
        assert "engine_restarting" in rest
        response += b"".join([piece async for piece in pieces])
        await left(writer)
        check_failure(response, "engine_restarting")
        assert not await is_ready()
        assert (await ask(address, "GET", "/health")).status == 200
        refused = await ask(address, "POST", ROUTE, completion())
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        await until(is_ready, seconds=60)
        assert await is_empty(address)
        assert (await ask(address, "POST", ROUTE, completion())).status == 200
        assert await figure(address, "engine_restarts") == 1

    asyncio.run(main())


KEY = "a-key-of-the-test"
BEARER = {"Authorization": f"Bearer {KEY}"}


async def check_keys(address):
    paths = (await ask(address, "GET", "/openapi.json", headers=BEARER)).json["paths"]
    routes = [(method.upper(), path) for path, of in paths.items() for method in of]
    assert {path for _, path in routes} >= {"/health", "/metrics", "/tokenize", ROUTE}
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/nope")]:
        body = {} if method == "POST" else None
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            reply = await ask(address, method, path, body, headers)
            assert reply.status == (200 if path == "/health" else 401), (method, path)
    for headers in (BEARER, {"Authorization": "Basic OmEta2V5LW9mLXRoZS10ZXN0"}):
        assert (await ask(address, "GET", "/v1/models", headers=headers)).status == 200


async def check_tokenizing(address):
    """Long texts to encode do not delay prompts."""
    text = {"content": "ab " * 200_000}
    long = [asyncio.create_task(ask(address, "POST", "/tokenize", text, BEARER)) for _ in range(8)]
    await asyncio.sleep(0.2)
    assert (await ask(address, "POST", ROUTE, completion(), BEARER)).status == 200
    assert not all(one.done() for one in long)
    for one in long:
        one.cancel()


async def check_end(address, process):
    """At SIGTERM requests in flight end, and new ones are refused; a second one drops them."""
    short, long = (
        asyncio.create_task(ask(address, "POST", ROUTE, completion(new=new), BEARER))
        for new in (600, 4000)
    )
    await until(lambda: in_flight(address, 2, BEARER))
    process.send_signal(signal.SIGTERM)

    async def is_ending():
        ready = await ask(address, "GET", "/ready", headers=BEARER)
        return (ready.status, ready.json) == (503, {"status": "shutting down"})

    await until(is_ending)
    refused = await ask(address, "POST", ROUTE, completion(), BEARER)
    assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
    reply = await short
    assert (reply.status, len(reply.json["choices"][0]["text"])) == (200, 600)
    process.send_signal(signal.SIGTERM)
    told = await long
    assert (told.status, told.json["error"]["code"]) == (503, "shutting_down")


def test_a_signal_before_the_model_is_loaded():
    command = [sys.executable, str(SERVER)]
    slow = {**os.environ, "START_SECONDS": "600"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=slow) as process:
        while subprocess.run(["pgrep", "-P", str(process.pid)], check=False).returncode:
            time.sleep(0.05)  # the signal is handled before the engine's process starts
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (143, "stopped before the model was loaded\n")


def test_keys_and_the_end():
    """Every route but /health needs a key. The server ends in order, and its engine with it."""
    with fake_server(max_sequences=4, key=KEY) as (address, process):
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        asyncio.run(check_keys(address))
        asyncio.run(check_tokenizing(address))
        asyncio.run(check_end(address, process))
        assert process.wait(60) == 128 + signal.SIGTERM
        assert children
        assert not any(os.path.exists(f"/proc/{child}/exe") for child in children)
        said = said_by(process)
        assert "shutting down after 2 requests" in said
        assert "dropped 1 request\n" in said


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({"Host": "attacker.example"}, completion(), 403, "forbidden_host"),
        ({"Content-Type": "text/plain"}, completion(), 415, "unsupported_media_type"),
        ({"Content-Length": "99999999"}, b"{}", 413, "body_too_large"),
        ({}, b"[" * 100_000, 400, None),
        ({}, b'{"model": "fake", "prompt": "\\ud800"}', 400, None),
        ({}, b'{"model": "fake", "prompt": "a", "temperature": NaN}', 400, None),
        ({}, b"\xff\xfe", 400, None),
        ({}, b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None),
        ({}, completion("a" * 5000), 400, "context_length_exceeded"),
        ({}, completion([999]), 400, None),
        ({}, completion([]), 400, None),
        ({}, completion(""), 400, None),
        ({}, completion(n=5), 400, None),
        ({}, completion(seed=2**64), 400, None),
        ({}, completion(logit_bias={"x": 1}), 400, None),
        ({}, completion(logit_bias={"9" * 5000: 1}), 400, None),
        ({}, completion(unknown=1), 400, None),
    ],
)
def test_wrong_requests_get_one_clear_line(address, headers, body, status, code):
    reply = asyncio.run(ask(address, "POST", ROUTE, body, headers))
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (status, code), error
    assert "\n" not in error["message"]
    assert "an error" not in error["message"]  # it says which
    assert error.keys() == {"message", "type", "param", "code"}
