"""The built-in corpus: the standard library of the running Python, about 11 MB of code.

It consists of all `.py` files, sorted by path, except test packages, files that the build of Python
wrote for this machine, installed packages, and near-duplicates. The modules depend on the version
of Python, but not on the machine.
"""

import functools
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
