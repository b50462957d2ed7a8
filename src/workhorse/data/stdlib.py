"""The built-in corpus: the standard library of the running Python, about 11 MB of code.

It is every `.py` file in the order of its path, except test packages, files that the build of
Python wrote for this machine, installed packages, and near-duplicates. Which modules there are
depends on the version of Python; which are kept does not depend on the machine.
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
"""Prefixes of the names of files that differ from machine to machine."""

SHINGLE_LINES = 3
NEAR_DUPLICATE = 0.3
"""Jaccard similarity of two files' shingles at which the later one is left out.

It is low on purpose, to drop the many code pages of `encodings` that repeat the same tables.
"""


@dataclass(frozen=True)
class Module:
    """One file of the standard library: `name` dotted, as it is imported."""

    name: str
    path: Path

    def text(self) -> str:
        """The source, decoded by its encoding cookie, with line ends as newlines."""
        try:
            with tokenize.open(self.path) as file:
                return file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise WorkhorseError(f"cannot read {self.path}: {error}; mend this Python") from None


@functools.cache
def candidates() -> tuple[Module, ...]:
    """Every module, near-duplicates included, in the order of the files' paths."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if LEFT_OUT_FOLDERS.isdisjoint(relative.parts) and not path.name.startswith(LEFT_OUT_FILES):
            found.append((relative.as_posix(), path))
    if not found:
        raise WorkhorseError(f"{root} holds no Python sources; choose another corpus than stdlib")
    return tuple(
        Module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path)
        for name, path in sorted(found)
    )


@functools.cache
def modules() -> tuple[Module, ...]:
    """The modules of the corpus, in the order of the files' paths."""
    modules = candidates()
    kept = unlike(module.text() for module in modules)
    return tuple(modules[index] for index in kept)


def unlike(texts: Iterable[str]) -> Iterator[int]:
    """The indices of the texts that are not empty and not near-duplicates of one kept before.

    Two texts are compared by the sets of their runs of three lines, ignoring blank lines and the
    amount of white space. This is exact, not sampled: an inverted index finds every pair that
    shares a run.
    """
    sizes: dict[int, int] = {}
    holders: dict[str, list[int]] = defaultdict(list)  # shingle -> the kept texts that have it
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
