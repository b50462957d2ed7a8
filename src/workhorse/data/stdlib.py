"""The built-in corpus: the standard library of the running Python, about 11 MB of code.

It consists of all `.py` files, sorted by path, except test packages, files that the build of Python
wrote for this machine, installed packages, and near-duplicates. The modules depend on the version
of Python, but not on the machine.
"""

import ast
import functools
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workhorse.errors import WorkhorseError

LEFT_OUT_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize")
"""Name prefixes of files that differ between machines."""

SHINGLE_LINES = 3
NEAR_DUPLICATE = 0.3
"""Jaccard similarity of two files, by groups of three lines, at which the later file is skipped.

It is low enough to skip the modules of `encodings` that contain almost the same table.
"""


@dataclass(frozen=True)
class Module:
    """One module of the standard library; `name` is its dotted import name."""

    name: str
    path: Path

    def text(self) -> str:
        """Read the source code in its declared encoding. Line ends become newlines."""
        try:
            with tokenize.open(self.path) as file:
                return file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise WorkhorseError(f"cannot read {self.path}: {error}; reinstall Python") from None


@functools.cache
def candidates() -> tuple[Module, ...]:
    """Return all modules of the standard library, sorted by file path.

    Near-duplicates are included; test packages and installed packages are not.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith(LEFT_OUT_FILES):
            found.append((relative.as_posix(), path))
    if not found:
        raise WorkhorseError(f"{root} has no Python files; choose another corpus than stdlib")
    return tuple(
        Module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path)
        for name, path in sorted(found)
    )


@functools.cache
def modules() -> tuple[Module, ...]:
    """Return the modules of the corpus, sorted by file path, without near-duplicates."""
    modules = candidates()
    kept = unlike(module.text() for module in modules)
    return tuple(modules[index] for index in kept)


QUESTIONS = ("What is {}?", "What does {} do?", "Explain {}.", "Describe {} in one sentence.")
SHORTEST, LONGEST = 20, 200
"""Limits of the characters in an answer's summary."""


def questions(rows: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, fields) of questions and answers about documented functions and classes.

    An answer names the object, its kind and its module, then gives the first paragraph of its
    docstring. A rejected or undesirable answer lacks the name. No question is asked twice.

    Args:
        rows: the kind of the records; see `ConversationsConfig.rows`.
    """
    for module in modules():
        for number, (name, kind, summary) in enumerate(_documented(module.text())):
            asked = QUESTIONS[number % len(QUESTIONS)].format(f"{module.name}.{name}")
            prompt = [{"role": "user", "content": asked}]
            good, bad = (
                [{"role": "assistant", "content": text}]
                for text in (f"`{name}` is a {kind} of `{module.name}`. {summary}", summary)
            )
            records: dict[str, dict[str, Any]] = {
                "conversations": {"messages": [*prompt, *good]},
                "pairs": {"prompt": prompt, "chosen": good, "rejected": bad},
                "labels": {
                    "prompt": prompt,
                    "completion": bad if number % 2 else good,
                    "label": not number % 2,
                },
            }
            yield f"{module.name}.{name}", records[rows]


def _documented(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, kind, summary) of each public function and class with a short summary.

    If several have the same name, the first of the least nested ones is yielded.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):  # breadth first
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
        summary = " ".join(paragraph.split())
        short = SHORTEST <= len(summary) <= LONGEST and summary.endswith(".")
        if short and node.name not in found:
            found.add(node.name)
            yield node.name, "class" if isinstance(node, ast.ClassDef) else "function", summary


def unlike(texts: Iterable[str]) -> Iterator[int]:
    """Yield the indices of strings that are not empty and not near-duplicates of earlier ones.

    Two strings are compared by their sets of shingles (three consecutive lines), ignoring blank
    lines and the amount of white space. The comparison is exact, not sampled: an inverted index
    finds every pair that shares a shingle.
    """
    sizes: dict[int, int] = {}
    holders: dict[str, list[int]] = defaultdict(list)  # shingle -> kept strings with it
    for index, text in enumerate(texts):
        shingles = _shingles(text)
        shared = Counter(holder for shingle in shingles for holder in holders.get(shingle, ()))
        if not shingles or any(
            common >= NEAR_DUPLICATE * (len(shingles) + sizes[holder] - common)
            for holder, common in shared.items()
        ):
            continue
        sizes[index] = len(shingles)
        for shingle in shingles:
            holders[shingle].append(index)
        yield index


def _shingles(text: str) -> set[str]:
    lines = [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]
    last = max(len(lines) - SHINGLE_LINES, 0)
    return {"\n".join(lines[i : i + SHINGLE_LINES]) for i in range(last + 1)} if lines else set()
