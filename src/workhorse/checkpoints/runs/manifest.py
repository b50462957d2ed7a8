"""The files of a checkpoint, opened only if they are what was written.

`manifest.json` has the size and the SHA-256 of the others. A file is opened once: what was compared
with the manifest is what is read, even if the checkpoint is removed meanwhile.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from workhorse.checkpoints.huggingface.tensor_folder import MappedFile
from workhorse.errors import WorkhorseError
from workhorse.tensors.safetensors_header import read_header
from workhorse.untrusted import read_text

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 10_000
"""More bytes than any manifest has."""


class DamagedCheckpoint(WorkhorseError):
    """A checkpoint that is not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} is damaged: {reason}; use an older one or a copy")


class OpenCheckpoint:
    """Files of a checkpoint that were compared with its manifest, open to be read.

    Args:
        path: of the checkpoint.
        files: by name, unbuffered.
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
    """Open the named files of a checkpoint and compare them with the manifest, byte for byte.

    Raises:
        DamagedCheckpoint: they differ, or the manifest is not as it was written.
    """
    listed = _read_manifest(path, step)
    with ExitStack() as opened:
        files = {name: opened.enter_context(_open(path, name, listed[name])) for name in names}
        yield OpenCheckpoint(path, files)


def manifest_of(folder: Path, step: int) -> str:
    """The manifest for a folder with a checkpoint's other files."""
    files = {}
    for name in (MODEL, OPTIMIZER, STATE):
        with (folder / name).open("rb", buffering=0) as file:
            files[name] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": _sha256(file)}
    return _text(step, files)


def _open(path: Path, name: str, expected: Mapping[str, Any]) -> FileIO:
    """One file, if it is what the manifest expects."""
    try:
        # What is a pipe does not make us wait for its writer.
        file = os.fdopen(os.open(path / name, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
    except OSError as error:
        raise DamagedCheckpoint(path, f"{name}: {error.strerror}") from None
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpoint(path, f"{name} is no file")
        if status.st_size != expected["bytes"]:
            reason = f"{name} has {status.st_size} bytes, not {expected['bytes']}"
            raise DamagedCheckpoint(path, reason)
        if _sha256(file) != expected["sha256"]:
            raise DamagedCheckpoint(path, f"{name} differs from its SHA-256")
    except OSError as error:
        file.close()
        raise DamagedCheckpoint(path, f"{name}: {error.strerror}") from None
    except DamagedCheckpoint:
        file.close()
        raise
    return file


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    """The entries of the manifest, if it is byte for byte as `manifest_of` gives it."""
    if (path / MANIFEST).exists() and not (path / MANIFEST).is_file():
        raise DamagedCheckpoint(path, f"{MANIFEST} is no file")
    try:
        text = read_text(path / MANIFEST, limit=MANIFEST_BYTES)
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
