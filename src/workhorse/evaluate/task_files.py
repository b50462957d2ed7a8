"""A task's own YAML file, checked before the harness reads it.

The harness's parsers of YAML and JSON are recursive C code, which crashes the process on deeply
nested input or on a file that is not a task.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workhorse.errors import WorkhorseError, shown
from workhorse.files.plain import read_text
from workhorse.files.yaml_text import parse_yaml

LARGEST = 1 << 20
"""Most bytes of a file that describes a task."""
SOURCES = ("dataset_path", "include", "class", "custom_dataset")
"""Keys that say where a task's questions come from; it has one of them."""


def check_file(path: Path) -> None:
    """Refuse a file that is not a task, or whose local questions are not JSON objects.

    Raises:
        WorkhorseError: says what is wrong and where.
    """
    # A function of the task's author is named by a tag; nothing is called here.
    text = read_text(path, limit=LARGEST).replace("!function ", "")
    try:
        task = parse_yaml(text)
    except WorkhorseError as error:
        raise WorkhorseError(f"{path}: {error}") from None
    if not isinstance(task, dict) or not (task.get("task") or task.get("group")):
        raise WorkhorseError(f"{path} is not a task; write a mapping with task: or group: NAME")
    if "group" not in task and not any(task.get(key) for key in SOURCES):
        raise WorkhorseError(f"{path} has no dataset_path; say where the questions are")
    for name in _texts(task.get("dataset_kwargs")):
        if name.endswith((".json", ".jsonl")) and Path(name).is_file():
            _check_questions(Path(name))


def _check_questions(path: Path) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.lstrip().startswith(b"["):
                return  # a list of them
            if line.strip() and not line.lstrip().startswith(b"{"):
                start = shown(line[:40].decode(errors="replace"))
                raise WorkhorseError(f"{path}:{number} is not a JSON object but {start}; fix it")


def _texts(value: Any) -> Iterator[str]:
    """Every string in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
