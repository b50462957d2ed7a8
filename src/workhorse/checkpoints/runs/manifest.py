"""The files of a checkpoint, their checksums, and the disk operations that write them.

`manifest.json` contains the size and the SHA-256 of the other files. Each file is verified and read
through one handle, so that the checkpoint may be removed in between.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from workhorse.checkpoints.huggingface.tensor_folder import MappedFile
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import Slices, fill, lay_out, read_header
from workhorse.files.text_formats import unreadable
from workhorse.files.writing import sync


class Disk:
    """File operations for checkpoints. Tests replace them to simulate failures."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; a link at its path is not followed."""
        if path.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.mkdir(parents=True, exist_ok=True)

    def lay_out(self, path: Path, slices: Slices) -> None:
        """Create a safetensors file at its final size; `fill` writes the tensors into it."""
        lay_out(path, slices)

    def fill(self, path: Path, slices: Slices) -> None:
        """Write slices of tensors to their positions in a file that `lay_out` created."""
        fill(path, slices)

    def write_text(self, path: Path, text: str) -> None:
        """Write a new file. An existing one is removed first, so that a link is not followed."""
        path.unlink(missing_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)

    def sync(self, path: Path) -> None:
        """Wait until a file, or the list of files in a folder, is on the disk (fsync)."""
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a folder and its content; if it is a link, only the link."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 10_000
"""Maximum number of bytes to read from a manifest; every manifest is smaller."""


REFUSED = {
    errno.EACCES,
    errno.EPERM,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""Error numbers after which a file may be intact, so that its checkpoint is not skipped."""


class DamagedCheckpoint(WorkhorseError):
    """A checkpoint with missing or changed files."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} is damaged: {reason}; use an older one or a copy")


class OpenCheckpoint:
    """The open files of a checkpoint, which were verified with its manifest.

    Args:
        path: the checkpoint's folder.
        files: the open files by name, unbuffered.
    """

    def __init__(self, path: Path, files: Mapping[str, FileIO]) -> None:
        self._path = path
        self._files = files

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, mapped into memory; they stay valid after the file is closed."""
        file = self._files[name]
        file.seek(0)
        stored = read_header(file, self._path / name)
        mapped = MappedFile(file, self._path / name)
        return {tensor: mapped.view(place) for tensor, place in stored.items()}

    def state(self) -> dict[str, Any]:
        """The content of `state.json`."""
        file = self._files[STATE]
        file.seek(0)
        return json.loads(file.read())


@contextmanager
def open_checkpoint(path: Path, step: int, names: tuple[str, ...]) -> Iterator[OpenCheckpoint]:
    """Open the named files of a checkpoint and verify their sizes and checksums.

    Raises:
        DamagedCheckpoint: a file or the manifest was changed after it was written.
    """
    listed = _read_manifest(path, step)
    with ExitStack() as opened:
        files = {name: opened.enter_context(_open(path, name, listed[name])) for name in names}
        yield OpenCheckpoint(path, files)


def manifest_of(folder: Path, step: int) -> str:
    """Return the text of `manifest.json` for the other files of a checkpoint."""
    files = {}
    for name in (MODEL, OPTIMIZER, STATE):
        with (folder / name).open("rb", buffering=0) as file:
            files[name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": _sha256(file)}
    return _text(step, files)


def _open(path: Path, name: str, expected: Mapping[str, Any]) -> FileIO:
    """Open a file, and check that it has the size and SHA-256 of the manifest."""
    with _reading(path, name), ExitStack() as opened:
        file = opened.enter_context(_opened(path, name))
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(path, f"{name} has {size} bytes, not {expected['bytes']}")
        if _sha256(file) != expected["sha256"]:
            raise DamagedCheckpoint(path, f"{name} does not match its SHA-256")
        opened.pop_all()
        return file


def _opened(path: Path, name: str) -> FileIO:
    # O_NONBLOCK: opening a pipe must not wait for its writer.
    descriptor = os.open(path / name, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(path, f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Distinguish a damaged file from a file that cannot be accessed."""
    try:
        yield
    except OSError as error:
        if error.errno in REFUSED:
            raise unreadable(path / name, error) from None
        raise DamagedCheckpoint(path, f"{name}: {error.strerror}") from None


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    """Read the size and SHA-256 of each file from the manifest, and check that it is unchanged."""
    with _reading(path, MANIFEST), _opened(path, MANIFEST) as file:
        raw = file.read(MANIFEST_BYTES)
    try:
        text = raw.decode()
        manifest = json.loads(text)
        written_format, written = manifest["format"], manifest["files"]
        files = {
            name: {"bytes": written[name]["bytes"], "sha256": written[name]["sha256"]}
            for name in (MODEL, OPTIMIZER, STATE)
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpoint(path, f"{MANIFEST} cannot be read") from None
    if isinstance(written_format, int) and written_format > FORMAT:
        raise DamagedCheckpoint(path, f"its format {written_format} is newer than {FORMAT}")
    if text != _text(step, files):
        raise DamagedCheckpoint(path, f"{MANIFEST} is not as it was written")
    return files


def _sha256(file: FileIO) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _text(step: int, files: Mapping[str, Mapping[str, Any]]) -> str:
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)
