"""Checkpoints in a folder: each whole or absent, and checked before it is believed.

    step-00001000/
        model.safetensors       weights by parameter name
        optimizer.safetensors   the optimizer's tensors
        state.json              everything else: counters, random states, the model's config
        manifest.json           size and SHA-256 of the others; written last

A checkpoint is written under a temporary name, synced, and renamed. So a folder with its final name
was whole when it was written, and the manifest tells whether it still is.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from workhorse.checkpoints.disk import Disk
from workhorse.errors import WorkhorseError
from workhorse.untrusted import read_text

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
MANIFEST_BYTES = 10_000
"""More than any manifest has."""

Found = TypeVar("Found")


class DamagedCheckpoint(WorkhorseError):
    """A checkpoint that is not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} is damaged: {reason}; use an older one or a copy")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, its tensors on the CPU."""

    step: int
    """Training steps done."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where; made when first needed.
        keep: how many to keep; older ones are removed after each save.
        disk: does the work; given by tests that fail or end it midway.
    """

    def __init__(self, folder: Path, keep: int = 2, disk: Disk | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.disk = disk or Disk()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, newest first."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint, then remove the oldest beyond `keep`.

        This one and older ones are counted. Newer ones, which a run that went back left behind
        because they were damaged, stay until their step comes again: what is whole in them is not
        lost, and they displace nothing.

        Args:
            step: training steps done.
            model: weights by parameter name; a shared one once.
            optimizer: the optimizer's tensors.
            state: what JSON can say.

        Raises:
            WorkhorseError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        final = self.path(step)
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        try:
            self.clean()
            self.disk.make_folder(temporary)
            self._write(temporary, step, model, optimizer, state)
            if final.exists():  # damaged: this run went back behind it
                self._discard(final)
            self.disk.rename(temporary, final)
            self.disk.sync(self.folder)
        except (OSError, SafetensorError) as error:
            self._give_up(temporary)
            raise WorkhorseError(self._failure(final, error)) from error
        self.prune(step)
        return final

    def prune(self, step: int) -> None:
        """Remove the oldest beyond `keep` of the checkpoints up to a step, whose own is whole."""
        for old in [found for found in self.steps() if found <= step][self.keep :]:
            self._discard(self.path(old))

    def newest(self, on_skip: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """The newest whole checkpoint, for a run that goes on; None if there is none.

        Args:
            on_skip: told, in one line each, which newer ones are damaged and how.
        """
        return self._newest(self.load, on_skip)

    def newest_state(
        self, on_skip: Callable[[str], None] = lambda line: None, *, alone: bool = False
    ) -> tuple[int, dict[str, Any]] | None:
        """The step and the state of the newest whole checkpoint, its tensors checked but not read.

        Args:
            on_skip: as in `newest`.
            alone: only the state need be whole; its tensors are not looked at.
        """

        def state(step: int) -> tuple[int, dict[str, Any]]:
            self.check(step, (STATE,) if alone else (MODEL, OPTIMIZER, STATE))
            return step, self._state(step)

        return self._newest(state, on_skip)

    def newest_model(
        self, on_skip: Callable[[str], None] = lambda line: None
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole weights and their state, see `load_model`; None if there are none."""
        return self._newest(self.load_model, on_skip)

    def newest_weights(self) -> int | None:
        """The newest step whose weights are whole, whatever became of its optimizer."""

        def checked(step: int) -> int:
            self.check(step, (MODEL, STATE))
            return step

        return self._newest(checked, lambda line: None)

    def _newest(self, read: Callable[[int], Found], on_skip: Callable[[str], None]) -> Found | None:
        for step in self.steps():
            try:
                return read(step)
            except DamagedCheckpoint as damaged:
                on_skip(f"skipping {damaged.path}: {damaged.reason}")
        return None

    def load(self, step: int) -> Checkpoint:
        """Read and check one checkpoint.

        Raises:
            DamagedCheckpoint: a missing, shortened or changed file.
        """
        self.check(step)
        path = self.path(step)
        return Checkpoint(
            step=step,
            model=load_file(path / MODEL),
            optimizer=load_file(path / OPTIMIZER),
            state=self._state(step),
        )

    def load_model(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and check the weights and the state of one checkpoint, without the optimizer.

        Raises:
            DamagedCheckpoint: a missing, shortened or changed file.
        """
        self.check(step, (MODEL, STATE))
        return load_file(self.path(step) / MODEL), self._state(step)

    def _state(self, step: int) -> dict[str, Any]:
        return json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))

    def check(self, step: int, names: tuple[str, ...] = (MODEL, OPTIMIZER, STATE)) -> None:
        """Compare the named files with the manifest, byte for byte.

        Raises:
            DamagedCheckpoint: they differ, or the manifest is not as it was written.
        """
        path = self.path(step)
        listed = self._manifest(step)
        for name in names:
            file, expected = path / name, listed[name]
            try:
                if not stat.S_ISREG(file.stat().st_mode):
                    raise DamagedCheckpoint(path, f"{name} is no file")
                if file.stat().st_size != expected["bytes"]:
                    reason = f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
                    raise DamagedCheckpoint(path, reason)
                if sha256(file) != expected["sha256"]:
                    raise DamagedCheckpoint(path, f"{name} differs from its SHA-256")
            except OSError as error:
                raise DamagedCheckpoint(path, f"{name}: {error.strerror}") from None

    def clean(self) -> None:
        """Remove what an interrupted save or removal left."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{TEMPORARY}*"):
                self.disk.remove(path)

    def _write(
        self,
        folder: Path,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> None:
        self.disk.write_tensors(folder / MODEL, model)
        self.disk.write_tensors(folder / OPTIMIZER, optimizer)
        self.disk.write_text(folder / STATE, json.dumps(state, indent=1))
        files = {}
        for name in (MODEL, OPTIMIZER, STATE):
            self.disk.sync(folder / name)
            file = folder / name
            files[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        self.disk.write_text(folder / MANIFEST, _manifest_text(step, files))
        self.disk.sync(folder / MANIFEST)
        self.disk.sync(folder)

    def _manifest(self, step: int) -> dict[str, Any]:
        """What the manifest lists, if it is byte for byte as `save` writes it."""
        path = self.path(step)
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
        if text != _manifest_text(step, files):
            raise DamagedCheckpoint(path, f"{MANIFEST} is not as it was written")
        return files

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint so that no half of it ever bears its name."""
        doomed = self.folder / f"{TEMPORARY}removed-{checkpoint.name}"
        self.disk.rename(checkpoint, doomed)
        self.disk.remove(doomed)

    def _give_up(self, temporary: Path) -> None:
        try:
            if temporary.exists():
                self.disk.remove(temporary)
        except OSError:
            pass  # the first failure is the one to tell; the next save cleans up

    def _failure(self, final: Path, error: Exception) -> str:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        steps = self.steps()
        last = f"the newest there is {self.path(steps[0]).name}" if steps else "there is none yet"
        return (
            f"cannot write checkpoint {final}: {cause}; {last}; "
            "make room and run again with --resume"
        )


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _manifest_text(step: int, files: Mapping[str, Mapping[str, Any]]) -> str:
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)
