"""Serving over HTTP: tokens per second and latencies for 1 to 32 streams, beside llama-server.

    python -m benchmarks.serving [--shape 160m] [--precision int8] [--llama-server PATH]

Each stream sends one request after another: a prompt of 128 random tokens, 64 new tokens, greedy.
The servers run one after another on the same weights, and each starts with a round that is not
counted. `long` is the time between tokens of 4 streams while a prompt of up to 4,000 tokens is
read. `cached` is the time to the first token of a prompt that was sent before, divided by that of
the first time.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from benchmarks.harness.models import _config
from benchmarks.harness.shapes import DECODING, TUNING

PROMPT, NEW = 128, 64
STREAMS = (1, 4, 8, 16, 32)
VOCAB = 32_000
PRECISIONS = {
    "bfloat16": (["--dtype", "bfloat16"], "bfloat16"),
    "float32": (["--dtype", "float32"], "float32"),
    "int8": (["--dtype", "bfloat16", "--quantize", "int8"], "q8_0"),
    "int4": (["--dtype", "bfloat16", "--quantize", "int4"], "q4_0"),
}
"""For each precision, our options, and the type of the weights in the peer's file."""


class Server(NamedTuple):
    """A running server."""

    name: str
    port: int
    model: str


class Timed(NamedTuple):
    """A request: seconds to the first event, between events, and in all; number of tokens."""

    first: float
    gaps: list[float]
    seconds: float
    tokens: int


def folder(shape: str, root: Path) -> Path:
    """A Hugging Face directory with random weights and a tokenizer; made if it does not exist."""
    path = root / f"{shape}-with-tokenizer"
    if path.exists():
        return path
    import torch

    from workhorse.checkpoints.huggingface.export import write_huggingface
    from workhorse.tokenizers import BpeConfig, train_tokenizer

    texts = [
        file.read_text(errors="ignore")
        for file in sorted(Path(random.__file__).parent.rglob("*.py"))
    ]
    tokenizer = train_tokenizer(BpeConfig(vocab_size=VOCAB), texts)
    torch.manual_seed(0)
    decoder = _config((TUNING | DECODING)[shape]).build(dtype=torch.bfloat16)
    temporary = path.with_suffix(".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    write_huggingface(temporary, decoder)
    tokenizer.save(temporary)
    temporary.rename(path)
    return path


def gguf(model: Path, dtype: str) -> Path:
    """The same model as a GGUF file; made if it does not exist."""
    path = model.with_suffix(f".{dtype}.gguf")
    if not path.exists():
        command = [sys.executable, "-m", "workhorse", "convert", str(model), str(path)]
        subprocess.run([*command, "--to", "gguf", "--dtype", dtype], check=True)
    return path


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def running(name: str, command: Sequence[str], port: int, model: str) -> Iterator[Server]:
    """Start a server, wait until it is ready, and end it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == HTTPStatus.OK:
                        break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} does not start: {' '.join(command)}") from None
                time.sleep(0.2)
        yield Server(name, port, model)
    finally:
        process.terminate()
        process.wait()


async def request(server: Server, prompt: Sequence[int], new: int) -> Timed:
    """Send a request for a stream, and time its events."""
    body = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    started = time.perf_counter()
    writer.write(head.encode() + data)
    times: list[float] = []
    tokens = 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            fields = json.loads(line[6:])
            if "error" in fields:
                raise RuntimeError(f"{server.name}: {fields}")
            if fields.get("usage"):
                tokens = fields["usage"]["completion_tokens"]
            if fields["choices"]:
                times.append(time.perf_counter())
    writer.close()
    if tokens != new:
        raise RuntimeError(f"{server.name} generated {tokens} tokens instead of {new}")
    gaps = [b - a for a, b in pairwise(times)]
    return Timed(times[0] - started, gaps, times[-1] - started, tokens)


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which the fraction `q` lies."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def streams(server: Server, count: int, each: int, pick: random.Random) -> list[Timed]:
    """Run `count` clients that send `each` requests one after another."""

    async def client() -> list[Timed]:
        prompts = [[pick.randrange(300, VOCAB) for _ in range(PROMPT)] for _ in range(each)]
        return [await request(server, prompt, NEW) for prompt in prompts]

    return [one for some in await asyncio.gather(*(client() for _ in range(count))) for one in some]


async def measure(
    server: Server, counts: Sequence[int], context: int
) -> dict[str, dict[str, float]]:
    """All rows of one server."""
    pick = random.Random(1)
    await streams(server, 2, 1, pick)
    rows: dict[str, dict[str, float]] = {}
    for count in counts:
        started = time.perf_counter()
        done = await streams(server, count, max(2, 8 // count), pick)
        seconds = time.perf_counter() - started
        gaps = [gap for one in done for gap in one.gaps]
        firsts = [one.first for one in done]
        rows[str(count)] = {
            "tokens/s": sum(one.tokens for one in done) / seconds,
            "first p50 ms": 1000 * quantile(firsts, 0.5),
            "first p99 ms": 1000 * quantile(firsts, 0.99),
            "between p50 ms": 1000 * quantile(gaps, 0.5),
            "between p99 ms": 1000 * quantile(gaps, 0.99),
        }
    rows |= await beside_a_long_prompt(server, min(4000, context - 200), pick)
    return rows | await cached(server, min(1000, context // 2), pick)


async def beside_a_long_prompt(
    server: Server, length: int, pick: random.Random
) -> dict[str, dict[str, float]]:
    """Time between tokens of 4 streams, alone and while a long prompt is read."""
    prompts = [[pick.randrange(300, VOCAB) for _ in range(16)] for _ in range(4)]
    alone = await asyncio.gather(*(request(server, prompt, 200) for prompt in prompts))
    tasks = [asyncio.create_task(request(server, [7, *prompt], 200)) for prompt in prompts]
    await asyncio.sleep(0.3)
    long = await request(server, [pick.randrange(300, VOCAB) for _ in range(length)], 2)
    beside = await asyncio.gather(*tasks)
    p99 = [quantile([gap for one in some for gap in one.gaps], 0.99) for some in (alone, beside)]
    return {
        f"long ({length})": {
            "first p50 ms": 1000 * long.first,
            "between p99 ms": 1000 * p99[1],
            "p99 / alone": p99[1] / p99[0],
        }
    }


async def cached(server: Server, length: int, pick: random.Random) -> dict[str, dict[str, float]]:
    """Time to the first token of a prompt that was sent before, divided by the first time."""
    ratios = []
    for _ in range(3):
        prompt = [pick.randrange(300, VOCAB) for _ in range(length)]
        cold = await request(server, prompt, 2)
        warm = await request(server, prompt, 2)
        ratios.append(warm.first / cold.first)
    return {f"cached ({length})": {"first / cold": quantile(ratios, 0.5)}}


def main() -> None:
    """Measure, and print a line for each row of each server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=DECODING, default="160m")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--llama-server", type=Path, help="the program llama-server of llama.cpp")
    parser.add_argument("--models", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--also", nargs="*", default=[], help="further options of workhorse serve")
    options = parser.parse_args()
    model = folder(options.shape, options.models)
    most = max(8, *options.streams)  # also for the streams beside a long prompt
    context = DECODING[options.shape].context
    commands: dict[str, tuple[list[str], int, str]] = {}
    port = free_port()
    ours = [sys.executable, "-m", "workhorse", "serve", str(model), "--port", str(port)]
    own, theirs = PRECISIONS[options.precision]
    ours += [*own, "--max-sequences", str(most), "--name", "m"]
    commands["workhorse"] = ([*ours, *options.also], port, "m")
    if options.llama_server:
        port = free_port()
        file = gguf(model, theirs)
        peer = [str(options.llama_server), "-m", str(file), "--port", str(port)]
        peer += ["-np", str(most), "-c", str(most * context), "--no-webui", "-t", "2"]
        commands["llama-server"] = (peer, port, "m")
    for name, (command, port, model_name) in commands.items():
        with running(name, command, port, model_name) as server:
            rows = asyncio.run(measure(server, options.streams, context))
        for row, figures in rows.items():
            text = ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
            print(f"{name:12} {row:>14}: {text}", flush=True)


if __name__ == "__main__":
    main()
