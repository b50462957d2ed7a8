"""Checks the files of a corpus: detects changes since a data set was made, and empty splits."""

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
    Generated,
    SourceConfig,
    StdlibConfig,
    TaskConfig,
    TextConfig,
)
from workhorse.data.documents import (
    SplitName,
    all_files,
    check_text_files,
    data_files,
    of_stdlib,
    read_documents,
)
from workhorse.data.files import visible_files
from workhorse.data.manifest import MANIFEST, ManifestConfig, read_manifest
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import read_text
from workhorse.files.writing import write_atomically

Progress = Callable[[int, int | None], None]
"""Progress callback: `(bytes of text processed, approximate total or None if unknown)`."""

SPLITS: tuple[SplitName, ...] = ("validation", "train")
"""The splits in preparation order: validation first, so that an empty one is reported early."""
FileState = tuple[int, int]
"""Size of a file in bytes, and its modification time in nanoseconds."""

SIZE_IS_TEXT = {"text", "folder", "stdlib"}
"""Kinds of source with plain text files. Their file sizes approximate the number of text bytes."""


def describe_sources(config: DataConfig) -> dict[str, dict[str, Any]]:
    """Describe each source: its config, its number of files and bytes, and a hash of their state.

    The state of a file is its path, size and modification time. For the standard input it is a hash
    of the content, because it is copied to a new file each time.
    """
    described = {}
    for name, source in config.sources.items():
        states = [_state(path, source) for path in all_files(source)]
        settings = source.to_dict()
        for key, default in (("on_error", "stop"), ("documents", None)):
            if settings.get(key, ...) == default:  # data sets of versions without it stay valid
                del settings[key]
        described[name] = {
            **settings,
            "files": len(states),
            "bytes": sum(size for _, size, _ in states),
            "state": hashlib.sha256(json.dumps(states).encode()).hexdigest(),
        }
    return described


def list_files(config: DataConfig) -> dict[str, dict[str, FileState]]:
    """Return the size and modification time of each file, by source name and relative path.

    The standard input is not included.
    """
    listed: dict[str, dict[str, FileState]] = {}
    for name, source in config.sources.items():
        files = listed[name] = {}
        if isinstance(source, TaskConfig):
            continue
        if isinstance(source, StdlibConfig) or of_stdlib(source):
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
                inside = path.relative_to(root).as_posix()  # "." if the path is a file
                files[inside if split == "train" else f"validation: {inside}"] = _size_and_time(
                    path
                )
    return listed


def _size_and_time(path: Path) -> FileState:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def text_bytes(described: dict[str, dict[str, Any]]) -> int | None:
    """Return the approximate total bytes of text, or None if file sizes do not show it.

    `described` is the result of `describe_sources`.
    """
    if any(source["kind"] not in SIZE_IS_TEXT for source in described.values()):
        return None
    return sum(source["bytes"] for source in described.values())


def why_empty(config: DataConfig, name: str, split: SplitName) -> str:
    """Return the error message for a source that has no text in one of its splits."""
    source = config.sources[name]
    match source:
        case StdlibConfig():
            where = "the standard library"
        case TaskConfig():
            where = f"the task {source.task}"
        case _:
            where = str(source.path)
    if not isinstance(source, Generated) and source.validation is not None:
        where = str(source.validation) if split == "validation" else where
    elif next(read_documents(source, "validation" if split == "train" else "train"), None):
        return (
            f"{where} {_why_undivided(source)}; add more, or train on all text with "
            f"{config.key_of(name)}.validation_fraction=0"
        )
    if isinstance(source, FolderConfig) and not data_files(source, split):
        there = len(visible_files(Path(where), "**/*"))
        if there == 0:
            return f"{where} has no files; name another folder"
        key = config.key_of(name)
        matched = f"{key}.glob={shown(source.glob)} matches no file in {where} (it has {there:,})"
        return f"{matched}; use another pattern, such as **/* for all files"
    empty = "has no text in its files" if Path(where).is_dir() else "is empty"
    return f"{where} {empty}: no text for the {split} split; add some"


def _why_undivided(source: SourceConfig) -> str:
    """Explain why a source that has text could not be divided into two splits."""
    match source:
        case TextConfig(documents=None):
            return "is too short to hold out a part for validation"
        case FolderConfig() | StdlibConfig():
            return "has only one document, but holding one out needs two"
        case _:
            return "has no two different documents, but holding one out needs two"


def check_outside(config: DataConfig, run: Path) -> None:
    """Check that the files of a run will not be read as documents of the run's own corpus.

    Raises:
        WorkhorseError: the run directory is in a corpus folder, and the pattern matches its files.
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
                    f"the run directory {run} is inside the corpus {folder}, so its files would "
                    "become documents; choose another --out, or a narrower glob"
                )


def check_sources(config: DataConfig) -> None:
    """Read the first document of each split of each source, and the first bytes of every file.

    Raises:
        WorkhorseError: a file cannot be read or is not UTF-8 text, or a split has no document.
    """
    check_text_files(config)
    for name, source in config.sources.items():
        for split in SPLITS:
            wanted = split == "train" or source.has_validation
            documents = read_documents(source, split, key=config.key_of(name))
            if wanted and next(documents, None) is None:
                raise WorkhorseError(why_empty(config, name, split))


def _state(path: Path, source: SourceConfig) -> tuple[str, int, int | str]:
    if not isinstance(source, Generated) and source.path == STDIN:
        with path.open("rb") as file:
            return str(STDIN), path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    return str(path.resolve()), *_size_and_time(path)


FILES = "files.json"
"""Name of the file beside the manifest that lists the size and modification time of source files.

It is used only for messages. A data set without it is valid."""
LARGEST = 1 << 28
"""Maximum size of a `files.json` in bytes. A list of a million files takes a tenth of it."""
NAMED = 3
"""Maximum number of files that a message names for each kind of change."""


@dataclass(frozen=True)
class FileChanges:
    """The files of a corpus that changed after its data set was made."""

    added: list[str]
    missing: list[str]
    resized: list[str]
    touched: list[str]
    """Files with a new modification time but the same size; their text may be unchanged."""

    @property
    def text_changed(self) -> bool:
        """True if the text has certainly changed: files were added, removed or resized."""
        return bool(self.added or self.missing or self.resized)

    def __str__(self) -> str:
        """List the first files of each kind of change: `added b.txt; missing a.txt`.

        Touched files are listed only if no other change explains that the text is different.
        """
        kinds = {"added": self.added, "missing": self.missing, "changed": self.resized}
        if not self.text_changed:
            kinds["perhaps changed"] = self.touched
        return "; ".join(f"{kind} {_named(files)}" for kind, files in kinds.items() if files)


def save_file_list(config: DataConfig, home: Path) -> None:
    """Write the list of the files of a corpus beside its data set."""
    write_atomically(home / FILES, json.dumps(list_files(config)).encode())


def file_changes(config: DataConfig, folder: Path, fingerprint: str) -> FileChanges | None:
    """Compare the files of a corpus with the files that a data set was made from.

    The data set is in the folder for data sets (see `prepare`) and has this fingerprint. Returns
    None if it does not exist, or if it has no list of files.

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
    name = str(read.path) if inside == "." and not isinstance(read, Generated) else inside
    return name if len(config.sources) == 1 else f"{source}: {name}"


def _named(files: list[str]) -> str:
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return ", ".join(files[:NAMED]) + more
