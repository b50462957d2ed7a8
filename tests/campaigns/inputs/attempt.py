"""One wrong input: a command line, what lies in the way, and what must come of it."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def turned(values: Sequence[T], count: int, turn: int) -> list[T]:
    """So many of the values, others at each turn, so that a few turns have had them all."""
    return [values[(turn * count + step) % len(values)] for step in range(min(count, len(values)))]


@dataclass(frozen=True)
class Attempt:
    """One command line, run in a fresh workplace.

    Attributes:
        name: tells it from all others; the part before the first `/` is its group.
        arguments: of the command.
        stdin: what it reads there.
        changes: by the path of a file in the workplace, what is done to it before: `["text", T]`,
            `["hex", H]`, `["cut", N]` (to so many bytes), `["pipe"]`, `["folder"]`, `["link", TO]`,
            `["gone"]`.
        writes: paths that a run that is not refused may make or change.
    """

    name: str
    arguments: list[str]
    stdin: str = ""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    writes: tuple[str, ...] = ("out", "home/.cache")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, place: Path) -> None:
        """Make the changes."""
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
