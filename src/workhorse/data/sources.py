"""Detects changes of the files that a data set was made from."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workhorse.data import stdlib
from workhorse.data.config import (
    STDIN,
    DataConfig,
    FolderConfig,
    SourceConfig,
    StdlibConfig,
    TextConfig,
)
from workhorse.data.documents import (
    SplitName,
    all_files,
    check_text_files,
    data_files,
    read_documents,
)
from workhorse.data.files import visible_files
from workhorse.data.manifest import MANIFEST, ManifestConfig, read_manifest
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import read_text
from workhorse.files.writing import write_atomically

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


FILES = "files.json"
"""Beside the manifest: the files that were read, by source and path, with size and time of each.

It serves messages only: a data set without it is just as good."""
LARGEST = 1 << 28
"""Most bytes of that file; a million files take a tenth of it."""
NAMED = 3
"""How many files of each kind a message names."""


@dataclass(frozen=True)
class FileChanges:
    """The files of a corpus that changed since its data set was made."""

    added: list[str]
    missing: list[str]
    resized: list[str]
    touched: list[str]
    """Written since then, with the same size: perhaps with the same text."""

    @property
    def text_changed(self) -> bool:
        """Whether the text has certainly changed."""
        return bool(self.added or self.missing or self.resized)

    def __str__(self) -> str:
        """Every kind of change with the names of the first files: `added b.txt; missing a.txt`.

        Files of another time only are listed if nothing else explains that the text is different.
        """
        kinds = {"added": self.added, "missing": self.missing, "changed": self.resized}
        if not self.text_changed:
            kinds["perhaps changed"] = self.touched
        return "; ".join(f"{kind} {_named(files)}" for kind, files in kinds.items() if files)


def save_file_list(config: DataConfig, home: Path) -> None:
    """Record the files of a corpus beside its data set."""
    write_atomically(home / FILES, json.dumps(list_files(config)).encode())


def file_changes(config: DataConfig, folder: Path, fingerprint: str) -> FileChanges | None:
    """Compare a corpus with what a data set was made from.

    Args:
        config: where the corpus is now.
        folder: where data sets are kept, as in `prepare`.
        fingerprint: of the data set.

    Returns:
        None if the data set, or its list of files, is missing.

    Raises:
        WorkhorseError: the corpus cannot be read.
    """
    before = _listed_in(_home(config.kept_in(folder), fingerprint))
    if before is None:
        return None
    now = {
        (source, name): state
        for source, files in list_files(config).items()
        for name, state in files.items()
    }
    common = before.keys() & now.keys()
    resized = {key for key in common if before[key][0] != now[key][0]}
    touched = {key for key in common - resized if before[key] != now[key]}

    def names(keys: Iterable[tuple[str, str]]) -> list[str]:
        return sorted(_name(config, *key) for key in keys)

    return FileChanges(
        added=names(now.keys() - before.keys()),
        missing=names(before.keys() - now.keys()),
        resized=names(resized),
        touched=names(touched),
    )


def _home(root: Path, fingerprint: str) -> Path | None:
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found: ManifestConfig = read_manifest(manifest.parent)
        except WorkhorseError:
            continue
        if found.complete and found.fingerprint == fingerprint:
            return manifest.parent
    return None


def _listed_in(home: Path | None) -> Mapping[tuple[str, str], FileState] | None:
    try:
        listed = json.loads(read_text(home / FILES, limit=LARGEST)) if home else None
        return listed and {
            (source, name): (int(size), int(time))
            for source, files in listed.items()
            for name, (size, time) in files.items()
        }
    except (WorkhorseError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _name(config: DataConfig, source: str, inside: str) -> str:
    read = config.sources[source]
    name = str(read.path) if inside == "." and not isinstance(read, StdlibConfig) else inside
    return name if len(config.sources) == 1 else f"{source}: {name}"


def _named(files: list[str]) -> str:
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return ", ".join(files[:NAMED]) + more
