"""A wrong input: a command line, changes to the files, and paths that it may write."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def turned(values: Sequence[T], count: int, turn: int) -> list[T]:
    """Select `count` of the values, different ones at each turn, so that turns cover all values."""
    return [values[(turn * count + step) % len(values)] for step in range(min(count, len(values)))]


@dataclass(frozen=True)
class Attempt:
    """One command line, run in a fresh workplace.

    Attributes:
        name: unique name; the part before the first `/` is its group.
        arguments: arguments of the command.
        stdin: standard input of the command.
        changes: changes made to the workplace before the run, by path: `["text", T]`,
            `["hex", H]`, `["cut", N]` (truncated to N bytes), `["pipe"]`, `["folder"]`,
            `["link", TO]`, `["gone"]`.
        writes: paths that a successful run may create or change.
    """

    name: str
    arguments: list[str]
    stdin: str = ""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    writes: tuple[str, ...] = ("out", "home/.cache")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, place: Path) -> None:
        """Apply the changes."""
        for name, (what, *value) in self.changes.items():
            path = place / name
            content = path.read_bytes() if path.is_file() else b""
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            match what:
                case "text":
                    path.write_text(value[0])
                case "hex":
                    path.write_bytes(bytes.fromhex(value[0]))
                case "cut":
                    path.write_bytes(content[: value[0]])
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case "link":
                    path.symlink_to(value[0])
                case "gone":
                    pass
                case _:
                    raise AssertionError(what)
