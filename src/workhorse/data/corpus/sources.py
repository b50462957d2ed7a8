"""Whether the sources of a data set changed, and why one has no text."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workhorse.data.config import (
    STDIN,
    DataConfig,
    FolderConfig,
    SourceConfig,
    StdlibConfig,
    TextConfig,
)
from workhorse.data.corpus import stdlib
from workhorse.data.corpus.documents import (
    SplitName,
    all_files,
    check_text_files,
    data_files,
    read_documents,
)
from workhorse.data.corpus.files import visible_files
from workhorse.errors import WorkhorseError, shown

Progress = Callable[[int, int | None], None]
"""Called with the UTF-8 bytes of text done, and about how many there are; None if unknown."""

SPLITS: tuple[SplitName, ...] = ("validation", "train")
"""The small one first: if it is empty, that shows before the long work."""
FileState = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""

SIZE_IS_TEXT = {"text", "folder", "stdlib"}
"""The kinds of source whose files are plain text."""


def describe_sources(config: DataConfig) -> dict[str, dict[str, Any]]:
    """For each source its config, its numbers of files and bytes, and a hash of the files' state.

    The state of a file is its path, size and time of change. The standard input, which is copied
    to a new file each time, is identified by its content.
    """
    described = {}
    for name, source in config.sources.items():
        states = [_state(path, source) for path in all_files(source)]
        described[name] = {
            **source.to_dict(),
            "files": len(states),
            "bytes": sum(size for _, size, _ in states),
            "state": hashlib.sha256(json.dumps(states).encode()).hexdigest(),
        }
    return described


def list_files(config: DataConfig) -> dict[str, dict[str, FileState]]:
    """The files of each source by their path in it; none of the standard input."""
    listed: dict[str, dict[str, FileState]] = {}
    for name, source in config.sources.items():
        files = listed[name] = {}
        if isinstance(source, StdlibConfig):
            files |= {module.name: _size_and_time(module.path) for module in stdlib.candidates()}
            continue
        roots: dict[SplitName, Path | None] = {
            "train": source.path,
            "validation": source.validation,
        }
        for split, root in roots.items():
            if root is None or root == STDIN:
                continue
            for path in data_files(source, split):
                inside = path.relative_to(root).as_posix()  # "." for the file that a path names
                files[inside if split == "train" else f"validation: {inside}"] = _size_and_time(
                    path
                )
    return listed


def _size_and_time(path: Path) -> FileState:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def text_bytes(described: dict[str, dict[str, Any]]) -> int | None:
    """About how many bytes of text there are; None if the sizes of the files do not tell."""
    if any(source["kind"] not in SIZE_IS_TEXT for source in described.values()):
        return None
    return sum(source["bytes"] for source in described.values())


def why_empty(config: DataConfig, name: str, split: SplitName) -> str:
    """The message for a split of a source that turned out to have no text."""
    source = config.sources[name]
    where = "the standard library" if isinstance(source, StdlibConfig) else str(source.path)
    if not isinstance(source, StdlibConfig) and source.validation is not None:
        where = str(source.validation) if split == "validation" else where
    elif next(read_documents(source, "validation" if split == "train" else "train"), None):
        return (
            f"{where} {_why_undivided(source)}; give it more, or train on all of it with "
            f"{config.key_of(name)}.validation_fraction=0"
        )
    if isinstance(source, FolderConfig) and not data_files(source, split):
        there = len(visible_files(Path(where), "**/*"))
        if there == 0:
            return f"{where} holds no file; name another folder"
        key = config.key_of(name)
        matched = f"{key}.glob={shown(source.glob)} matches no file in {where} (it holds {there:,})"
        return f"{matched}; give another, as **/* for all of them"
    empty = "has no text in the files that are read" if Path(where).is_dir() else "is empty"
    return f"{where} {empty}: none for the {split} split; give it some"


def _why_undivided(source: SourceConfig) -> str:
    """Why a source that has text gives none to one of the splits."""
    match source:
        case TextConfig():
            return "is too short to hold out a part"
        case FolderConfig() | StdlibConfig():
            return "has one document, and needs two to hold one out"
        case _:
            return "has no two different documents, and needs two to hold one out"


def check_outside(config: DataConfig, run: Path) -> None:
    """Refuse a run directory whose files would be documents of its own corpus.

    Raises:
        WorkhorseError: it lies in a folder whose pattern matches what a run writes.
    """
    for source in config.sources.values():
        if not isinstance(source, FolderConfig):
            continue
        for folder in (source.path, source.validation):
            if folder is None or not run.resolve().is_relative_to(folder.resolve()):
                continue
            inside = run.resolve().relative_to(folder.resolve()) / "recipe.yaml"
            hidden = any(part.startswith(".") for part in inside.parts)
            deep = "**" in source.glob or source.glob.count("/") == len(inside.parts) - 1
            if deep and not hidden and inside.match(source.glob):
                raise WorkhorseError(
                    f"the run directory {run} lies in the corpus {folder}, which its files would "
                    "become part of; choose another --out, or a narrower glob"
                )


def check_sources(config: DataConfig) -> None:
    """Read the first document of each split of each source, and the first bytes of every file.

    Raises:
        WorkhorseError: it cannot be read, there is none, or a file is not UTF-8 text.
    """
    check_text_files(config)
    for name, source in config.sources.items():
        for split in SPLITS:
            wanted = split == "train" or source.has_validation
            documents = read_documents(source, split, key=config.key_of(name))
            if wanted and next(documents, None) is None:
                raise WorkhorseError(why_empty(config, name, split))


def _state(path: Path, source: SourceConfig) -> tuple[str, int, int | str]:
    if not isinstance(source, StdlibConfig) and source.path == STDIN:
        with path.open("rb") as file:
            return str(STDIN), path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    return str(path.resolve()), *_size_and_time(path)
