"""Which files of a corpus have changed since a data set was made from it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workhorse.data.config import DataConfig, StdlibConfig
from workhorse.data.corpus.sources import FileState, list_files
from workhorse.data.shards.manifest import MANIFEST, ManifestConfig, read_manifest
from workhorse.errors import WorkhorseError
from workhorse.files.plain import read_text
from workhorse.files.writing import write_atomically

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
