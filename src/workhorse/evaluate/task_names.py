"""The names of the harness's tasks, as found in its files.

Importing the harness and indexing its tasks takes tens of seconds; finding that a name is in none
of its files takes two.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from workhorse.errors import WorkhorseError, shown

NAMED = re.compile(r"^\s*(?:task|group|tag)\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
PATTERN = frozenset("*?[")
LISTED = 3
"""Most near names that an error suggests."""


def check_names(names: Sequence[str], include_path: str | Path | None = None) -> None:
    """Refuse a name that is in no file of tasks; one that is may still not be a task.

    Without the harness nothing is refused.

    Args:
        names: names of tasks; patterns and YAML files among them are left to the harness.
        include_path: a folder of more tasks.

    Raises:
        WorkhorseError: there is such a name; the error suggests the nearest ones.
    """
    harness = find_spec("lm_eval")
    if harness is None or harness.origin is None:
        return
    folders = [Path(include_path)] if include_path is not None else []
    folders.append(Path(harness.origin).parent / "tasks")
    missing = {name for name in names if not PATTERN & set(name) and not is_file(name)}
    known: set[str] = set()
    for text in _texts(folders):
        missing = {name for name in missing if name not in text}
        if not missing:
            return
        known.update(NAMED.findall(text))
    for name in names:
        if name in missing:
            raise unknown(name, known)


def is_file(name: str) -> bool:
    """Whether a name is that of a YAML file."""
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def unknown(name: str, known: Iterable[str]) -> WorkhorseError:
    """The error for an unknown name: of thousands of tasks, it suggests those of a similar name."""
    near = difflib.get_close_matches(name, sorted(known), n=LISTED, cutoff=0.6)
    remedy = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else "lm-eval ls tasks lists them"
    )
    return WorkhorseError(f"there is no task {shown(name)}; {remedy}")


def _texts(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        for file in folder.rglob("*.y*ml"):
            yield file.read_text("utf-8", errors="replace")
