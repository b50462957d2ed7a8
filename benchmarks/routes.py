"""Code paths of common tasks: the executed functions of the package, their files and their lines.

    python -m benchmarks.routes [--execution auto] [--json] [NAME ...]

| name | from | to |
|---|---|---|
| `batch` | the rows of the data | the updated weights, in a training step after the first |
| `generate` | a prompt | the completion of a loaded model |
| `chat` | a request to a server that has answered another one | the last event of its stream |
| `rl` | the end of a step with a policy | the logged end of the next one, with its rollouts |
| `start` | the call of `train` with a recipe | the event `start`, which precedes the first step |

A function that is called counts once, with all its lines, including the docstring. Modules, classes
and decorators do not count, nor does a function that was entered before, such as the engine's loop.
A server's engine runs in a thread here. The process that renders chat templates is not traced.
"""

import argparse
import ast
import asyncio
import functools
import json
import socket
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import torch

import workhorse
from workhorse.execute.body import EXECUTIONS, Execution
from workhorse.generate import Engine, GenerationConfig
from workhorse.run import train
from workhorse.serve.app import create_app
from workhorse.serve.engine_client import EngineClient
from workhorse.serve.engine_process import Worker, build
from workhorse.serve.gate import Limits
from workhorse.serve.messages import ModelFacts
from workhorse.serve.metrics import Metrics
from workhorse.serve.settings import EngineSettings
from workhorse.train import Recipe
from workhorse.train.report.metrics import Event

ROOT = Path(str(workhorse.__file__)).parent
Lines = dict[str, dict[str, int]]
"""Number of lines of each function, by file."""
STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case
"""Nodes that can contain functions."""
MODEL = {
    "d_model": 64,
    "n_layers": 2,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 128, "activation": "silu"},
        }
    },
    "final_norm": {"kind": "rms_norm"},
}


class Trace:
    """Context manager that records the functions of the package that any thread calls.

    Threads that were started before are not recorded.
    """

    def __init__(self) -> None:
        self._seen: set[CodeType] = set()

    def __enter__(self) -> Self:
        self.restart()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    def restart(self) -> None:
        """Forget the calls so far."""
        self._seen.clear()

    def lines(self) -> Lines:
        """Return the functions that were called, and their lines."""
        called: dict[Path, set[int]] = defaultdict(set)
        for code in [*self._seen]:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT):
                called[path].add(code.co_firstlineno)
        found = {str(path.relative_to(ROOT)): _of(path, firsts) for path, firsts in called.items()}
        return {path: functions for path, functions in sorted(found.items()) if functions}


def _of(path: Path, firsts: set[int]) -> dict[str, int]:
    """Number of lines of the functions of a file that begin at some lines, by qualified name.

    The lines of an inner function count only for itself.
    """
    found: dict[str, int] = {}

    def look(node: ast.AST, inside: str) -> int:
        """Return the number of lines that are counted within a node."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{inside}.{node.name}"
        children = (node for node in ast.iter_child_nodes(node) if isinstance(node, STATEMENTS))
        counted = sum(look(child, inside) for child in children)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return counted
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        if first not in firsts:
            return counted
        assert node.end_lineno is not None
        whole = node.end_lineno - node.lineno + 1
        found[inside.removeprefix(".")] = whole - counted
        return whole

    look(_parsed(path), "")
    return found


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def batch(execution: Execution) -> Lines:
    """Functions of a training step with default settings."""
    from workhorse.data import Batches, DataConfig, prepare
    from workhorse.nn import DecoderConfig
    from workhorse.tokenizers import BytesConfig, train_tokenizer
    from workhorse.train import TrainConfig
    from workhorse.train.step.build import build_step

    tokenizer = train_tokenizer(BytesConfig(), [])
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("some text to learn from, again and again; " * 200)
        data = DataConfig.from_dict({"corpus": {"kind": "text", "path": str(corpus)}})
        dataset = prepare(data, tokenizer, Path(folder) / "data")
        batches = Batches(dataset.train, seq_len=32, batch_size=4)
        fields = {**MODEL, "vocab_size": tokenizer.vocab_size, "max_seq_len": 32}
        config = TrainConfig(steps=3, batch_size=4, seq_len=32, execution=execution)
        step = build_step(DecoderConfig.from_dict(fields).build(), config, torch.device("cpu"))

        def take(number: int) -> None:
            step.update(*step.backward(batches[number], number), schedule=1.0)

        take(0)
        with Trace() as trace:
            take(1)
        return trace.lines()


def generate(execution: Execution) -> Lines:
    """Functions of a call of `generate` on a loaded model."""
    from workhorse.models import preset
    from workhorse.nn import DecoderConfig
    from workhorse.tokenizers import BytesConfig, train_tokenizer

    tokenizer = train_tokenizer(BytesConfig(), [])
    smaller = {"vocab_size": tokenizer.vocab_size, "d_model": 48, "n_layers": 2}
    decoder = DecoderConfig.from_dict({**preset("gpt2").to_dict(), **smaller}).build()
    with tempfile.TemporaryDirectory() as folder:
        stored = workhorse.save(decoder, Path(folder) / "model", tokenizer=tokenizer)
        model = workhorse.load(stored, execution=execution, notify=lambda _: None)
        config = GenerationConfig(max_new_tokens=4, temperature=0)
        model.generate("some words", config)
        with Trace() as trace:
            model.generate("other words", config)
        return trace.lines()


def _recipe(data: dict[str, Any], **train: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "route",
            "model": MODEL,
            "tokenizer": {"kind": "bytes", "special": {}},
            "data": data,
            "train": {"batch_size": 8, "seq_len": 64, "log_every": 1, **train},
        }
    )


def rl(execution: Execution) -> Lines:
    """Functions of a step that learns from its own completions, with its line in the log."""
    corpus = {"kind": "task", "task": "copy", "difficulty": 3, "count": 60}
    recipe = _recipe(
        {"corpus": corpus, "packing": "padded"},
        steps=3,
        execution=execution,
        objective={"kind": "policy"},
        rollouts={"completions": 4, "max_new_tokens": 5},
    )
    trace, found = Trace(), Lines()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:

        def listen(event: Event) -> None:
            if event["kind"] == "step":
                found.update(trace.lines())  # empty after the first step
                stack.enter_context(trace)

        train(recipe, Path(folder) / "run", on_event=listen)
    return found


def start(execution: Execution) -> Lines:
    """Functions of a new run before its first step."""
    trace, found = Trace(), Lines()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("some text to learn from, again and again; " * 200)
        data = {"corpus": {"kind": "text", "path": str(corpus)}}
        recipe = _recipe(data, steps=1, execution=execution)

        def listen(event: Event) -> None:
            if event["kind"] == "start":
                found.update(trace.lines())

        with trace:
            train(recipe, Path(folder) / "run", on_event=listen)
    return found


class InThread(EngineClient):
    """A client whose engine runs in a thread of this process.

    Args:
        engine: the engine.
        facts: the facts about its model.
        metrics: gets the reports of the steps.
    """

    def __init__(self, engine: Engine, facts: ModelFacts, metrics: Metrics) -> None:
        settings = EngineSettings(facts.name)
        super().__init__(settings, say=str, on_step=metrics.stepped, command=())
        self._engine, self._facts = engine, facts

    async def _launch(self) -> tuple[asyncio.StreamReader, ModelFacts]:
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours)

        def work() -> None:
            with theirs, theirs.makefile("rb") as received:
                Worker(self._engine, theirs, received, self._facts.tokenizer).run()

        threading.Thread(target=work, daemon=True).start()
        self.state = "ready"
        return reader, self._facts

    async def close(self) -> None:
        assert self._writer is not None
        self._writer.close()  # ends the thread
        await super().close()


async def _post(app: Any, path: str, body: dict[str, Any]) -> bytes:
    """Send a request to an ASGI application, and return the body of its answer."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    answer = bytearray()

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        answer.extend(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
    }
    await app(scope, receive, send)
    return bytes(answer)


def chat(execution: Execution) -> Lines:
    """Functions of a streamed reply of the server and its engine."""
    with tempfile.TemporaryDirectory() as folder:
        run, chats = Path(folder) / "run", Path(folder) / "chats.jsonl"
        question = {"role": "user", "content": "1+1?"}
        record = {"messages": [question, {"role": "assistant", "content": "2"}]}
        chats.write_text((json.dumps(record) + "\n") * 20)
        corpus = {"kind": "conversations", "path": str(chats), "validation_fraction": 0}
        train(_recipe({"corpus": corpus}, steps=1), run)
        engine, facts = build(EngineSettings(str(run), execution=execution))

        async def talk(trace: Trace) -> Lines:
            metrics = Metrics()
            client = InThread(engine, facts, metrics)
            await client.start()
            app = create_app(
                client,
                facts,
                name="route",
                metrics=metrics,
                keys=(),
                limits=Limits(),
                loopback=True,
            )
            body = {
                "model": "route",
                "messages": [question],
                "stream": True,
                "max_tokens": 4,
                "temperature": 0.5,
                "seed": 1,
            }
            for _ in range(2):
                trace.restart()
                answer = await _post(app, "/v1/chat/completions", body)
                assert answer.endswith(b"data: [DONE]\n\n"), answer
            found = trace.lines()
            await client.close()
            return found

        with Trace() as trace:
            return asyncio.run(talk(trace))


# First the start of a run, which calls functions that only run once per process.
ROUTES = {route.__name__: route for route in (start, batch, generate, chat, rl)}


def total(lines: Lines, within: str = "") -> int:
    """The number of lines of all functions, or of those in one folder."""
    files = (functions for path, functions in lines.items() if path.startswith(within))
    return sum(sum(functions.values()) for functions in files)


def page(name: str, lines: Lines) -> str:
    """A code path as a table."""
    rows = [f"{sum(of.values()):>6}  {path}: {', '.join(sorted(of))}" for path, of in lines.items()]
    outside = total(lines) - total(lines, "nn/")
    files = sum(not path.startswith("nn/") for path in lines)
    head = f"{name}: {outside} lines in {files} files outside nn/, {total(lines, 'nn/')} inside"
    return "\n".join([head, *rows])


def main() -> None:
    """Run the command."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ROUTES)}; default all")
    made.add_argument("--execution", choices=EXECUTIONS, default="auto")
    made.add_argument("--json", action="store_true", help="print functions and lines as JSON")
    options = made.parse_args()
    routes = {name: ROUTES[name](options.execution) for name in options.names or ROUTES}
    if options.json:
        print(json.dumps(routes))
    else:
        print("\n\n".join(page(name, lines) for name, lines in routes.items()))


if __name__ == "__main__":
    main()
