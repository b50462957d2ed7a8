"""Damaged files of runs, model directories, tokenizers, data sets and corpora."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.inputs.attempt import Attempt, turned

DEEP = "[" * 5000 + "]" * 5000
DEEPER = '{"a":' * 100_000
HUGE = "9" * 5000

SPOILT: dict[str, list[Any]] = {
    "empty": ["text", ""],
    "a space": ["text", " \n"],
    "a word": ["text", "word"],
    "a number": ["text", "1"],
    "a huge number": ["text", HUGE],
    "infinity": ["text", "-Infinity"],
    "null": ["text", "null"],
    "a list": ["text", "[1, 2]"],
    "an empty mapping": ["text", "{}"],
    "another mapping": ["text", '{"a": {"b": [1]}}\n'],
    "deep": ["text", DEEP],
    "deep, never closed": ["text", DEEPER],
    "deep nesting in a mapping": ["text", f'{{"kind": "step", "step": 1, "loss": {DEEP}}}\n'],
    "a huge number in a mapping": ["text", f'{{"kind": "step", "step": {HUGE}}}\n'],
    "binary": ["hex", bytes(range(256)).hex() * 8],
    "NULs": ["hex", "00" * 4096],
    "UTF-16": ["hex", '{"format": 1}\n'.encode("utf-16").hex()],
    "a byte order mark": ["hex", "efbbbf7b7d"],
    "a lone surrogate": ["text", r'{"a": "\ud800"}'],
    "a key twice": ["text", '{"kind": 1, "kind": 1}'],
    "a pipe": ["pipe"],
    "a folder": ["folder"],
    "a link to itself": ["link", "."],
    "a link to nothing": ["link", "nothing-there"],
    "a link to an endless device": ["link", "/dev/zero"],
    "missing": ["gone"],
}
CUTS = (1, 7, 8, 40, -1)
"""Bytes to keep; if negative, bytes to cut off."""

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 3.5, 1e308, 10**30, 10**5000, "", "word"),
    *([], {}, [[]], [None], {"a": 1}, "DEEP"),
)
"""Values that replace every value in every JSON file."""

OF_RUN = {
    "generate": ["generate", "run", "--prompt", "ab", "--max-new-tokens", "2"],
    "evaluate": ["evaluate", "run"],
    "resume": ["train", "recipe.yaml", "train.steps=3", "--out", "run", "--resume"],
    "init": ["train", "recipe.yaml", "init=run", "model={}", "--out", "out"],
    "convert": ["convert", "run", "out", "--to", "hf"],
    "chat": ["chat", "run", "--max-new-tokens", "2"],
}
TRAIN = ["train", "recipe.yaml", "--out", "out"]
GENERATE = ["--prompt", "ab", "--max-new-tokens", "2"]
USES: dict[str, dict[str, list[str]]] = {
    "run/*": OF_RUN,
    "run/checkpoints/*/*": OF_RUN,
    "run/tokenizer/*": OF_RUN,
    "run/data/*/*": {"resume": OF_RUN["resume"]},
    "hf/*": {
        "generate": ["generate", "hf", *GENERATE],
        "evaluate": ["evaluate", "hf", "--data", "text.txt"],
        "chat": ["chat", "hf", "--max-new-tokens", "2"],
        "to workhorse": ["convert", "hf", "out", "--to", "workhorse"],
        "to gguf": ["convert", "hf", "out", "--to", "gguf"],
        "init": ["train", "recipe.yaml", "init=hf", "model={}", "--out", "out"],
    },
    "native/*": {
        "generate": ["generate", "native", *GENERATE],
        "convert": ["convert", "native", "out", "--to", "hf"],
    },
    "native/tokenizer/*": {"generate": ["generate", "native", *GENERATE]},
    "bpe/*": {
        "report": ["tokenizer", "report", "bpe", "text.txt"],
        "train": ["train", "recipe.yaml", "tokenizer={kind: file, path: bpe}", "--out", "out"],
    },
    "prepared/data/*/*": {
        "prepare": ["data", "prepare", "recipe.yaml", "--out", "prepared"],
        "inspect": ["data", "inspect", "recipe.yaml", "--out", "prepared"],
        "verify": ["data", "inspect", "recipe.yaml", "--out", "prepared"],
    },
    "model.gguf": {
        "generate": ["generate", "model.gguf", *GENERATE],
        "convert": ["convert", "model.gguf", "out", "--to", "workhorse"],
    },
    "text.txt": {
        "evaluate": ["evaluate", "run", "--data", "text.txt"],
        "tokenizer": ["tokenizer", "train", "text.txt", "--vocab-size", "280", "--out", "out"],
        "report": ["tokenizer", "report", "bpe", "text.txt"],
    },
    "lines.jsonl": {
        "evaluate": ["evaluate", "run", "--data", "lines.jsonl"],
        "tokenizer": ["tokenizer", "train", "lines.jsonl", "--vocab-size", "280", "--out", "out"],
        "train": [*TRAIN, "data.corpus={kind: jsonl, path: lines.jsonl}"],
    },
    "texts/*": {
        "evaluate": ["evaluate", "run"],
        "train": ["train", "recipe.yaml", "--out", "out"],
    },
    "task.yaml": {"tasks": ["evaluate", "run", "--tasks", "task.yaml", "--limit", "1"]},
    "questions.jsonl": {"tasks": ["evaluate", "run", "--tasks", "task.yaml", "--limit", "1"]},
}
"""Command lines that read files of the workplace, by the pattern of the files."""

LINES = {
    "a list": "[1]",
    "a number": "1",
    "a huge number": f'{{"text": {HUGE}}}',
    "a huge exponent": '{"text": 1e400}',
    "not a number": '{"text": NaN}',
    "deep": f'{{"text": {DEEP}}}',
    "deep, never closed": DEEPER,
    "no text": "{}",
    "a text that is a list": '{"text": ["a"]}',
    "a lone surrogate": r'{"text": "\ud800"}',
    "a field that is a lone surrogate": r'{"\ud800": "a"}',
    "a key twice": '{"text": "a", "text": "b"}',
    "no JSON": "{text: a}",
    "a NUL": '{"text": "\\u0000"}',
    "only null": '{"text": null}',
    "half a line": '{"text": "a',
    "control bytes": "\x1b[31m\a",
}
"""Lines that are not valid JSON, or JSON without a text."""


OF_EACH_FIELD = 1
"""Number of wrong values that a field of a JSON file gets."""
USES_OF_EACH = 1
"""Number of command lines that read each damaged file."""


def attempts(place: Path, turn: int = 0) -> Iterator[Attempt]:
    """All attempts, for the files in `place` and the JSON in them."""
    for pattern, uses in USES.items():
        files = [path for path in sorted(place.glob(pattern)) if path.is_file()]
        assert files, pattern
        for file in files:
            name = file.relative_to(place).as_posix()
            if name.endswith((".html", ".lock")) or (
                name.startswith("texts") and "a.txt" not in name
            ):
                continue
            for number, (how, change) in enumerate((*SPOILT.items(), *_cuts(file))):
                chosen = dict(turned(list(uses.items()), USES_OF_EACH, turn + number))
                yield from _uses(f"files/{name}/{how}", chosen, {name: change})
            if name.endswith(".json"):
                yield from _fields(name, json.loads(file.read_text()), uses, turn)
    for name, line in LINES.items():
        changes = {"lines.jsonl": ["text", f'{{"text": "a"}}\n{line}\n']}
        yield from _uses(f"lines/{name}", USES["lines.jsonl"], changes)
        changes = {"run/metrics.jsonl": ["text", f"{line}\n"]}
        yield from _uses(f"lines/metrics/{name}", {"resume": OF_RUN["resume"]}, changes)


def _cuts(file: Path) -> Iterator[tuple[str, list[Any]]]:
    size = file.stat().st_size
    for cut in sorted({cut if cut > 0 else size + cut for cut in CUTS} | {size // 2}):
        if 0 < cut < size:
            yield f"cut to {cut}", ["cut", cut]


def _uses(name: str, uses: dict[str, list[str]], changes: dict[str, Any]) -> Iterator[Attempt]:
    for use, line in uses.items():
        written = {"resume": ("run",), "prepare": ("prepared",), "inspect": ("prepared",)}.get(
            use, ("prepared",) if use == "verify" else ()
        )
        yield Attempt(f"{name}/{use}", line, "hello\n", changes, ("out", "home/.cache", *written))


def _fields(name: str, data: Any, uses: dict[str, list[str]], turn: int) -> Iterator[Attempt]:
    """Attempts that replace each value of a JSON file by wrong values."""
    places = list(_places(data))
    # The first use reads the most. The values of a large file are sampled evenly.
    first = dict([next(iter(uses.items()))])
    for index, (path, put) in enumerate(places[:: max(1, len(places) // 24)]):
        for shift, wrong in enumerate(turned(WRONG, OF_EACH_FIELD, turn + index)):
            text = put(wrong).replace('"DEEP"', DEEP)
            shown = str(wrong)[:20] if wrong != 10**5000 else "huge"
            yield from _uses(f"fields/{name}/{path}={shown}/{shift}", first, {name: ["text", text]})


def _places(data: Any) -> Iterator[tuple[str, Callable[[Any], str]]]:
    """Each value in a JSON document: its path, and a function that replaces it."""

    def walk(
        value: Any, path: str, rebuild: Callable[[Any], Any]
    ) -> Iterator[tuple[str, Callable[[Any], str]]]:
        inner: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            inner = list(value.items())
        elif isinstance(value, list):
            inner = list(enumerate(value))[:3]
        for key, item in inner:

            def replaced(wrong: Any, key: Any = key) -> Any:
                copy = dict(value) if isinstance(value, dict) else list(value)
                copy[key] = wrong
                return rebuild(copy)

            yield f"{path}.{key}", lambda wrong, replaced=replaced: _dumped(replaced(wrong))
            yield from walk(item, f"{path}.{key}", replaced)

    yield from walk(data, "", lambda whole: whole)


def _dumped(data: Any) -> str:
    text = json.dumps(data, default=str) if not _holds_huge(data) else ""
    return text or json.dumps(_marked(data)).replace('"HUGE"', HUGE)


def _holds_huge(data: Any) -> bool:
    if isinstance(data, dict):
        return any(map(_holds_huge, data.values()))
    if isinstance(data, list):
        return any(map(_holds_huge, data))
    return isinstance(data, int) and data > 10**40


def _marked(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _marked(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_marked(value) for value in data]
    return "HUGE" if isinstance(data, int) and data > 10**40 else data
