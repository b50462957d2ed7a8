"""Figures in documents agree with the results that commands wrote, as `docs/figures.yaml` says."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.shapes import DECODING
from workhorse.config.base import read_yaml
from workhorse.models import presets
from workhorse.models.huggingface import MODEL_TYPES
from workhorse.nn import DecoderConfig, blocks
from workhorse.nn.attention.grouped import Attention

ROOT = Path(__file__).parent.parent
PLAN: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "figures.yaml").read_text("utf-8"))
WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?![\w])"
    rf"|\b(?:{'|'.join(WORDS)})(?= (?:minutes|seconds|hours|times)\b)"
)
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)")
"""Code and the targets of links."""


def prose(page: str) -> str:
    """The text of a page on one line, without blocks of code."""
    text = (ROOT / page).read_text("utf-8")
    return " ".join(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split())


def figures(text: str) -> Iterator[tuple[int, str]]:
    """The position and the text of each figure."""
    hidden = [range(*found.span()) for found in NO_FIGURES.finditer(text)]
    for name in PLAN["names"]:
        hidden += [range(*found.span()) for found in re.finditer(re.escape(name), text)]
    for found in FIGURE.finditer(text):
        if not any(found.start() in span for span in hidden):
            yield found.start(), found[0].rstrip(",")


def statements(function: Callable[..., object]) -> int:
    """Number of lines of a function's body, without its docstring."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return len(tree.body) - (ast.get_docstring(tree) is not None)


def parameters_of_the_demo() -> float:
    written = read_yaml(ROOT / "recipes" / "stdlib-small.yaml")
    train, model = written["train"], written["model"]
    sizes = {"vocab_size": written["tokenizer"]["vocab_size"], "max_seq_len": train["seq_len"]}
    decoder = DecoderConfig.from_dict({**model, **sizes}).build(device="meta")
    return sum(parameter.numel() for parameter in decoder.parameters())


def parameters_of_160m() -> float:
    shape = DECODING["160m"]
    return shape.product_weights + shape.vocab_size * shape.d_model


def minutes_of_the_demo() -> float:
    return float(re.findall(r"train\.minutes=(\d+)", (ROOT / "Makefile").read_text())[0])


def largest_difference() -> float:
    """The largest difference from transformers in float32, in the table that is measured."""
    lines = (ROOT / "docs" / "families.md").read_text("utf-8").splitlines()
    cells = [line.split(" | ")[3:6] for line in lines if line.startswith("| `")]
    return max(float(cell) for row in cells for cell in row if re.fullmatch(r"[\d.]+e-\d+", cell))


def of_blocks() -> list[int]:
    """The number of lines of each kind of block."""
    found = [one for one in vars(blocks).values() if isinstance(one, type)]
    kinds = [one for one in found if issubclass(one, blocks.Block) and one is not blocks.Block]
    return [statements(one.forward) for one in kinds]


COMPUTED: dict[str, Callable[[], float]] = {
    "model types": lambda: len(MODEL_TYPES),
    "presets": lambda: len(presets()),
    "parameters of the demo": parameters_of_the_demo,
    "minutes of the demo": minutes_of_the_demo,
    "largest difference from transformers": largest_difference,
    "lines of attention": lambda: statements(Attention.forward),
    "fewest lines of a block": lambda: min(of_blocks()),
    "most lines of a block": lambda: max(of_blocks()),
    "parameters of 160m": parameters_of_160m,
}
"""Figures that the source determines."""


def stored(file: str, key: str) -> float:
    """A value of a result file: `CASE/WHO/FIELD` of a benchmark, or a key of an object.

    `best peer` is the peer with the largest median. Shares of a limit are in percent.
    """
    result = json.loads((ROOT / file).read_text("utf-8"))
    if isinstance(result, dict):
        return result[key]
    case, who, field = key.split("/")
    entries = next(one for one in result if one["case"] == case)["entries"]
    if who == "best peer":
        peers = [one for one in entries if not one["name"].startswith("Workhorse")]
        entry = max(peers, key=lambda one: one["median"])
    else:
        entry = next(one for one in entries if one["name"] == who)
    return 100 * entry[field] if field == "of_limit" else entry[field]


def sources(row: dict[str, Any], count: int) -> list[list[float]]:
    """For each of the figures of a row, the values that it may state."""
    if "line" in row:
        lines = (ROOT / row["file"]).read_text("utf-8").splitlines()
        text = " ".join(one for one in lines if row["line"] in one)
        values = [
            float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\.?\d*(?:e-?\d+)?", text)
        ]
        return [values] * count
    keys = row.get("keys", [])
    assert len(keys) == count, row
    return [[stored(row["file"], key) if "file" in row else COMPUTED[key]()] for key in keys]


def agrees(shown: str, value: float, row: dict[str, Any]) -> bool:
    number = WORDS.index(shown) + 2.0 if shown in WORDS else float(shown.replace(",", ""))
    value = abs(value) * float(row.get("scale", 1))
    if row.get("at_most"):
        return value <= number
    decimals = len(shown.partition(".")[2])
    return abs(number - value) <= 0.5000001 * 10**-decimals


def place(page: str, row: dict[str, Any]) -> range:
    text = prose(page)
    assert text.count(row["text"]) == 1, (
        f"{page}: {row['text']!r} is there {text.count(row['text'])} times"
    )
    return range(text.index(row["text"]), text.index(row["text"]) + len(row["text"]))


@pytest.mark.parametrize(
    ("page", "row"),
    [(page, row) for page, rows in PLAN["pages"].items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else value["text"][:40],
)
def test_a_figure_agrees_with_its_source(page: str, row: dict[str, Any]) -> None:
    span, text = place(page, row), prose(page)
    shown = [figure for at, figure in figures(text) if at in span]
    assert shown, f"{row['text']!r} has no figure"
    for figure, values in zip(shown, sources(row, len(shown)), strict=True):
        every = all if row.get("at_most") else any
        assert every(agrees(figure, value, row) for value in values), (figure, values[:5])


def test_every_figure_of_the_readme_has_a_source() -> None:
    spans = [place("README.md", row) for row in PLAN["pages"]["README.md"]]
    text = prose("README.md")
    missing = [
        text[max(0, at - 40) : at + 20]
        for at, _ in figures(text)
        if not any(at in span for span in spans)
    ]
    assert missing == [], "add a row to docs/figures.yaml"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,831 | | 455 and 2.2 times", ["1,831", "455", "2.2"]),
        ("about two minutes, GPT-2, bfloat16, 160m", ["two"]),
        ("`train.steps=9` and [page](9.md) within 1e-5 and 5 %", ["1e-5", "5"]),
    ],
)
def test_what_a_figure_is(text: str, found: list[str]) -> None:
    assert [figure for _, figure in figures(text)] == found


def test_a_rounded_value_agrees() -> None:
    row: dict[str, Any] = {"text": ""}
    assert agrees("1,831", 1831.4, row)
    assert not agrees("1,831", 1831.6, row)
    assert agrees("2.2", 2.23, row)
    assert agrees("four", 4.1, row)
    assert not agrees("2.3", 2.23, row)
    assert agrees("5", -4.9, {"at_most": True})
    assert not agrees("5", 5.1, {"at_most": True})
