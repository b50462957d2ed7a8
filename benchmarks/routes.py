"""Code path of a training batch and of a request: executed files, functions and their lines.

    python -m benchmarks.routes [--execution auto] [--json]

A batch is one training step after the first, from the rows of the data to the updated weights. A
request is one generation of a loaded model, from prompt to completion. A function that is called
counts with all its lines, including the docstring. Modules, classes and decorators do not count.
"""

import argparse
import ast
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import workhorse
from workhorse.execute.body import EXECUTIONS, Execution
from workhorse.generate import GenerationConfig

ROOT = Path(str(workhorse.__file__)).parent
Lines = dict[str, dict[str, int]]
"""Number of lines of each function, by file."""
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


def executed(call: Callable[[], object]) -> Lines:
    """The functions of the package that a call executes, in any thread, and their lines."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found: Lines = defaultdict(dict)
    for code in seen:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            extent = _functions(path).get(code.co_firstlineno)
            if extent is not None:
                name, lines = extent
                found[str(path.relative_to(ROOT))][name] = lines
    return dict(sorted(found.items()))


@cache
def _functions(path: Path) -> dict[int, tuple[str, int]]:
    """Name and number of lines of each function of a file, by its first line."""
    found: dict[int, tuple[str, int]] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            assert node.end_lineno is not None
            found[first] = node.name, node.end_lineno - node.lineno + 1
    return found


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
        return executed(lambda: take(1))


def request(execution: Execution) -> Lines:
    """Functions of a request to a loaded model."""
    model = workhorse.load("gpt2", execution=execution, notify=lambda _: None)
    config = GenerationConfig(max_new_tokens=4, temperature=0)
    model.generate("some words", config)
    return executed(lambda: model.generate("other words", config))


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
    made.add_argument("--execution", choices=EXECUTIONS, default="auto")
    made.add_argument("--json", action="store_true", help="print functions and lines as JSON")
    options = made.parse_args()
    routes = {"batch": batch(options.execution), "request": request(options.execution)}
    if options.json:
        print(json.dumps(routes))
    else:
        print("\n\n".join(page(name, lines) for name, lines in routes.items()))


if __name__ == "__main__":
    main()
