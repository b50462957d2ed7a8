"""A small chat model, and a server of it that all tests of this folder share."""

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import uvicorn
import yaml
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from benchmarks.routes import InThread
from workhorse.checkpoints import RunDirectory, weights_of
from workhorse.nn import DecoderConfig
from workhorse.serve.app import create_app
from workhorse.serve.engine_process import build
from workhorse.serve.gate import Limits
from workhorse.serve.messages import ModelFacts
from workhorse.serve.metrics import Metrics
from workhorse.serve.run import listen
from workhorse.serve.settings import EngineSettings
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, Tokenizer, train_tokenizer
from workhorse.tokenizers.chat.template import with_template

CONTEXT = 512
END = 262
"""Id of the token that ends a turn."""
PADDING = 2
"""Number of rows of the embedding that have no token. They are likely and must never be chosen."""
MODEL = "chatty"
KEY = "key-of-the-tests"
EVENT = TypeAdapter(ResponseStreamEvent)
"""Checks the events of /v1/responses against the types of OpenAI's client."""


def small_config(**more: Any) -> DecoderConfig:
    """Return the config of a small decoder with native steps."""
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
        "feed_forward": {"kind": "gated_mlp", "d_ff": 32},
    }
    parts = {"d_model": 16, "blocks": {"main": block}, "final_norm": {"kind": "rms_norm"}}
    return DecoderConfig.from_dict(parts | more)


def write_chat_run(folder: Path, template: str | None = None, context: int = CONTEXT) -> Path:
    """Write a run directory: a byte-level chat model with random weights.

    Its replies are mostly ASCII. A sampled reply ends after about ten tokens.

    Args:
        folder: the directory.
        template: source of its chat template; None: the default one.
        context: the maximum sequence length.
    """
    tokenizer = with_template(train_tokenizer(BytesConfig(special=SpecialTokensConfig()), []))
    if template is not None:
        tokenizer = Tokenizer(tokenizer.definition, tokenizer.roles, template)
    config = small_config(
        vocab_size=tokenizer.vocab_size + PADDING,
        n_layers=1,
        max_seq_len=context,
        head={"bias": True},
        init={"kind": "normal", "std": 0.5},
    )
    torch.manual_seed(0)
    weights = weights_of(config.build())
    bias = weights["head.proj.bias"]
    bias[tokenizer.encode("".join(map(chr, range(32, 127))))] = 3.0
    bias[[*tokenizer.special_tokens.values()]] = -3.0
    bias[END] = 5.0
    bias[tokenizer.vocab_size :] = 4.0
    run = RunDirectory(folder)
    run.path.mkdir()
    # Only a run of chats, or one that began with a chat model, uses its chat template.
    run.begin(yaml.safe_dump({"name": MODEL, "init": "a/chat-model", "data": DATA}))
    run.save_tokenizer(tokenizer)
    run.save_config(config)
    run.store().save(1, weights, {}, {"config": config.to_dict()})
    return run.path


DATA = {"corpus": {"kind": "folder", "path": "texts"}}


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    """Address of the API, which ends with /v1."""
    root: str
    """Address without /v1."""
    folder: Path
    """The model's run directory."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the chat model, in this process; test_invariance.py starts one of its own."""
    folder = write_chat_run(tmp_path_factory.mktemp("serve") / MODEL)
    with serving_here(folder) as url:
        yield Served(url, url.removesuffix("/v1"), folder)


class serving:
    """Context manager: runs `workhorse serve` and returns the address of its API."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "workhorse", "serve", str(folder), "--port", "0"]
        self._command = [*command, "--json", *options]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            env={**os.environ, "WORKHORSE_API_KEY": KEY},
        )
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())["url"]

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


@contextlib.contextmanager
def serving_here(folder: Path, **settings: Any) -> Iterator[str]:
    """Serve a model in threads of this process, which takes a tenth of the time of `serving`.

    Args:
        folder: the directory of the model; clients know the model by the folder's name.
        settings: see `EngineSettings`.

    Yields:
        The address of its API.
    """
    engine, facts = build(EngineSettings(str(folder), **settings))
    with in_threads(engine, facts, name=folder.name, keys=(KEY,)) as address:
        yield f"{address}/v1"


@contextlib.contextmanager
def in_threads(
    engine: Any,
    facts: ModelFacts,
    *,
    name: str,
    keys: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008 (it is frozen)
) -> Iterator[str]:
    """Run a server and its engine in threads of this process, and yield the server's address."""
    started: queue.SimpleQueue[uvicorn.Server | None] = queue.SimpleQueue()
    bound = listen("127.0.0.1", 0)

    async def run() -> None:
        metrics = Metrics()
        client = InThread(engine, facts, metrics)
        await client.start()
        app = create_app(
            client, facts, name=name, metrics=metrics, keys=keys, limits=limits, loopback=True
        )
        settings = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(settings)
        running = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        started.put(server)
        await running
        await client.close()

    with bound, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(asyncio.run, run())
        ended.add_done_callback(lambda _: started.put(None))
        server = started.get()
        if server is not None:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            server.should_exit = server.force_exit = True
        ended.result()


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx2.Client]:
    """A client of the server without a library, with its key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=served.root, headers=headers, timeout=60) as found:
        yield found
