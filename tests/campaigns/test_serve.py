"""Abuse of the server: fuzzed requests, clients that leave, overload, and one client with many.

The engine has steps of fixed time (`tests/serve/fake_engine.py`), so that the load generator does
not compete with a model for the cores. What is measured is the policy and the HTTP process.
"""

import asyncio
import contextlib
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.serve.raw import (
    ask,
    completion,
    connect,
    encoded,
    fake_server,
    left,
    read_head,
    read_reply,
)
from tests.serve.schemas import random_schema
from workhorse.serve.grammar import Grammars, source_of
from workhorse.serve.messages import GrammarSource
from workhorse.serve.schema import StructuredOutputs
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer

pytestmark = pytest.mark.campaign
ROUTE = "/v1/completions"
FUZZED = 100_000
CLIENTS = 100_000
OVERLOAD_SECONDS = 600


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def figures(address: str) -> dict[str, float]:
    text = (await ask(address, "GET", "/metrics")).body.decode()
    return {
        name: float(value) for name, value in re.findall(r"^workhorse_(\w+) (\S+)$", text, re.M)
    }


async def until_empty(address: str, seconds: float) -> None:
    """Wait until no completion runs or waits, and no cache block is in use."""
    names = ("running_completions", "waiting_completions", "cache_used_ratio")
    end = time.monotonic() + seconds
    while True:
        now = await figures(address)
        if not any(now[name] for name in names):
            return
        assert time.monotonic() < end, "requests or blocks are left"
        await asyncio.sleep(0.01)


def resident(pid: int) -> int:
    """Bytes of RAM of a process and of those that it started."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            parent = int(re.findall(r"PPid:\s+(\d+)", text)[0])
            if pid in (parent, int(status.parent.name)):
                total += 1024 * int(re.findall(r"VmRSS:\s+(\d+)", text)[0])
    return total


JUNK = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    "",
    "a" * 300,
    "\x00\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": {"b": []}},
    [1, "a"],
    "json",
    -(2**63),
    0.5,
]
FIELDS = [
    *("model", "prompt", "messages", "temperature", "top_p", "n", "stop", "max_tokens", "echo"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "stream", "stream_options"),
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "timings", "logprobs", "top_logprobs"),
    *("best_of", "suffix", "tools", "response_format", "user", "metadata", "store", "functions"),
    *("tokens", "content", "max_completion_tokens", "nonsense"),
    *("input", "instructions", "text", "reasoning", "include", "max_output_tokens", "tool_choice"),
    *("structured_outputs", "reply_tokens", "chat_template_kwargs", "reasoning_effort"),
]
PATHS = (
    ROUTE,
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/metrics",
    "/%00",
)


def fuzzed(pick: random.Random) -> bytes:
    """A request that is valid but for a few fields, or bytes that are no JSON."""
    path = pick.choice(PATHS)
    body: dict = {"model": "fake", "max_tokens": pick.randint(1, 3)}
    if path == ROUTE:
        body["prompt"] = pick.choice(["abc", [97, 98], ["a", "b"], [[97], [98, 99]]])
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "hi"}]
        if pick.random() < 0.5:
            body["messages"][0][pick.choice(["role", "content", "name", "x"])] = pick.choice(JUNK)
    elif path == "/v1/responses":
        item = {"role": "user", "content": "hi"}
        if pick.random() < 0.5:
            item[pick.choice(["type", "role", "content", "id", "call_id"])] = pick.choice(JUNK)
        body = {"model": "fake", "max_output_tokens": 2, "input": pick.choice(["hi", [item]])}
    elif path == "/tokenize":
        body = {"content": "abc"}
    elif path == "/detokenize":
        body = {"tokens": [97]}
    for _ in range(pick.choice((0, 1, 1, 2, 5))):
        body[pick.choice(FIELDS)] = pick.choice(JUNK)
    data = json.dumps(body).encode()
    if pick.random() < 0.1:
        at = pick.randrange(len(data))
        data = data[:at] + bytes([pick.randrange(256)]) + data[at + pick.choice((0, 1)) :]
    method = pick.choice(("POST",) * 8 + ("GET", "PUT"))
    return encoded(method, path, data, {"Content-Type": "application/json"})


def test_no_request_makes_the_server_fail():
    """No answer has a status of 500 or more."""
    counts: dict[int, int] = {}

    async def client(address: str, seed: int, count: int) -> None:
        pick = random.Random(seed)
        reader, writer = await connect(address)
        for _ in range(count):
            request = fuzzed(pick)
            writer.write(request)
            reply = await asyncio.wait_for(read_reply(reader), 60)
            assert reply.status < 500, (request, reply.body[:500])
            counts[reply.status] = counts.get(reply.status, 0) + 1
            if reply.headers.get("connection") == "close":
                await left(writer)
                reader, writer = await connect(address)
        await left(writer)

    async def main(address: str) -> None:
        async with asyncio.TaskGroup() as group:
            for seed in range(8):
                group.create_task(client(address, seed, FUZZED // 8))
        await until_empty(address, 5)

    with fake_server(step=0.0, max_sequences=32, places=64) as (address, _):
        asyncio.run(main(address))
    print(f"{sum(counts.values()):,} fuzzed requests: {dict(sorted(counts.items()))}")
    assert counts[200] > FUZZED // 100


def test_clients_that_leave_cost_no_memory():
    """30 % leave while the prompt arrives, waits or is read, or in the middle of the stream."""

    async def client(address: str, pick: random.Random) -> None:
        reader, writer = await connect(address)
        body = completion("a" * pick.randint(1, 400), pick.randint(2, 12), stream=True)
        request = encoded("POST", ROUTE, body)
        moment = pick.random()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if moment < 0.1:
                writer.write(request[: pick.randrange(len(request))])
            elif moment < 0.2:
                writer.write(request)
                await asyncio.sleep(pick.random() * 0.01)
            elif moment < 0.3:
                writer.write(request)
                await read_head(reader)
                await reader.readline()
            else:
                writer.write(request)
                await read_reply(reader)
        await left(writer)

    async def crowd(address: str, seed: int, count: int) -> None:
        pick = random.Random(seed)
        for _ in range(count):
            await client(address, pick)

    async def wave(address: str, first: int, clients: int) -> None:
        async with asyncio.TaskGroup() as group:
            for seed in range(32):
                group.create_task(crowd(address, first + seed, clients // 32))
        await until_empty(address, 1)

    with fake_server(step=0.001, max_sequences=32, places=64) as (address, process):
        asyncio.run(wave(address, 0, CLIENTS // 5))
        before = resident(process.pid)
        asyncio.run(wave(address, 100, CLIENTS - CLIENTS // 5))
        drift = resident(process.pid) / before - 1
    print(f"{CLIENTS:,} clients, 30 % left early: memory {drift:+.2%} of {before / 2**20:.0f} MiB")
    assert drift < 0.01


def test_overload_is_refused_at_once():
    """Ten times the capacity: bounded latency of admitted requests, refusals within 50 ms."""
    slots, new, step = 8, 50, 0.005
    capacity = slots / (new * step)  # requests per second
    alone: list[float] = []
    admitted: list[float] = []
    refused: list[float] = []

    async def one(address: str, into: list[float] | None = None) -> None:
        started = time.monotonic()
        reply = await ask(address, "POST", ROUTE, completion(new=new))
        elapsed = time.monotonic() - started
        assert reply.status in (200, 429)
        (into if into is not None else admitted if reply.status == 200 else refused).append(elapsed)

    async def main(address: str) -> None:
        for _ in range(40):
            await one(address, alone)
        async with asyncio.TaskGroup() as group:
            end, pick = time.monotonic() + OVERLOAD_SECONDS, random.Random(1)
            while time.monotonic() < end:
                group.create_task(one(address))
                await asyncio.sleep(pick.expovariate(10 * capacity))
        await until_empty(address, 5)

    # All requests come from one address, which may take three quarters of the places.
    places = 2 * slots * 4 // 3
    with fake_server(step=step, max_sequences=slots, places=places) as (address, process):
        asyncio.run(main(address))
        used = resident(process.pid)
    p99, unloaded = quantile(admitted, 0.99), quantile(alone, 0.99)
    late = quantile(refused, 0.99)
    print(
        f"{len(admitted):,} admitted, p99 {p99:.3f} s, alone {unloaded:.3f} s "
        f"({p99 / unloaded:.2f} x); {len(refused):,} refused, median "
        f"{1000 * statistics.median(refused):.1f} ms, p99 {1000 * late:.1f} ms; "
        f"{used / 2**20:.0f} MiB"
    )
    assert p99 <= 2 * unloaded
    assert late <= 0.05


def test_a_client_with_few_requests_does_not_wait_for_one_with_many(tmp_path):
    """Two clients by their keys: the p95 of the one with few is at most twice that alone."""

    async def few(address: str) -> list[float]:
        times = []
        for _ in range(40):
            started = time.monotonic()
            reply = await ask(address, "POST", ROUTE, completion(new=40), keys[1])
            assert reply.status == 200
            times.append(time.monotonic() - started)
        return times

    async def main(address: str) -> tuple[float, float]:
        alone = await few(address)
        many = [
            asyncio.create_task(ask(address, "POST", ROUTE, completion(new=2000), keys[0]))
            for _ in range(100)
        ]
        await asyncio.sleep(0.3)
        beside = await few(address)
        assert not all(one.done() for one in many)
        for one in many:
            one.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        await until_empty_with_key(address)
        return quantile(alone, 0.95), quantile(beside, 0.95)

    async def until_empty_with_key(address: str) -> None:
        for _ in range(500):
            text = (await ask(address, "GET", "/metrics", headers=keys[1])).body.decode()
            if "workhorse_running_completions 0.0" in text:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("requests are left")

    names = ("the-first-key", "the-second-key")
    keys = [{"Authorization": f"Bearer {name}"} for name in names]
    with fake_server(step=0.005, max_sequences=8, places=128, key=",".join(names)) as (address, _):
        alone, beside = asyncio.run(main(address))
    print(f"p95 alone {alone:.3f} s, beside 100 requests of another client {beside:.3f} s")
    assert beside <= 2 * alone


class ManyTokens:
    """The part of a `Tokenizer` that grammars use, with 128,000 tokens: bytes and random words."""

    vocab_size = 128_000

    def __init__(self) -> None:
        pick, letters = random.Random(3), b' etaoinshrdlucmfwypvbgk0123456789{}[]",:'
        words = {bytes(pick.choices(letters, k=pick.randint(2, 9))): None for _ in range(150_000)}
        tokens = [*(bytes([value]) for value in range(256)), *words]
        self._tokens = [*tokens[:127_999], b"<|eos|>"]
        self.special_tokens = {"<|eos|>": 127_999}

    def token_bytes(self, token: int) -> bytes:
        return self._tokens[token]

    display_bytes = token_bytes

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], *, skip_special: bool) -> str:
        return b"".join(self._tokens[token] for token in tokens if token < 127_999).decode()


@pytest.mark.parametrize("count", [2000, 50])
def test_values_of_generated_schemas_are_valid(count):
    """Random logits: all values are valid and within 400 tokens, also with a large vocabulary."""
    tokenizer: Any = ManyTokens()
    if count > 50:
        tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig()), [])
    (end,) = ends = [tokenizer.special_tokens["<|eos|>"]]
    grammars, pick, seconds = Grammars(tokenizer, ends), random.Random(11), []
    torch.manual_seed(1)
    for _ in range(count):
        schema = random_schema(pick)
        source = source_of(StructuredOutputs.model_validate({"json": schema}))
        grammar = grammars.make(GrammarSource(source), 0, most := 400)
        tokens: list[int] = []
        while len(tokens) < most and not grammar.ends(tokens, "") and end not in tokens[-1:]:
            logits = torch.randn(tokenizer.vocab_size)
            started = time.thread_time()
            logits = grammar(logits, tokens)
            seconds.append(time.thread_time() - started)
            tokens.append(int(logits.softmax(-1).multinomial(1)))
        jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special=True)), schema)
    late = quantile(seconds, 0.99)
    print(f"{count:,} schemas, {len(seconds):,} masks, p99 of the CPU time {1000 * late:.2f} ms")
    assert late <= 0.001
