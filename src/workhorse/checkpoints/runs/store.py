"""Checkpoints in a folder: each whole or absent, and verified before use.

    step-00001000/
        model.safetensors       weights by parameter name
        optimizer.safetensors   the optimizer's tensors
        state.json              everything else: counters, random states, the model's config
        manifest.json           size and SHA-256 of the others; written last

A checkpoint is written under a temporary name, synced, and renamed. So a folder with its final name
was whole when it was written, and the manifest tells whether it still is.

A checkpoint that is deleted is renamed first. What cannot be deleted stays under its temporary
name: the save succeeds, `remarks` gets one line, and each later save tries again.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from workhorse.checkpoints.runs.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    DamagedCheckpoint,
    Disk,
    manifest_of,
    open_checkpoint,
)
from workhorse.errors import WorkhorseError
from workhorse.files.safetensors import Slices, whole
from workhorse.files.writing import refusal

TEMPORARY = ".tmp-"
LEFTOVER = re.compile(r"\.tmp-(removed-)?step-[0-9]{8,}(-[0-9a-f]{8})?")
"""The temporary names of this file; nothing else in the folder is deleted."""
LOOKS = 100
"""How often to look for the newest checkpoint while each is removed before it is read."""

Found = TypeVar("Found")
Tensors = Mapping[str, Slices]
"""What a process has to write into each file of tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, its tensors on the CPU."""

    step: int
    """Training steps done."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, by the name of its folder; None: that of no checkpoint."""
    name = re.fullmatch(r"step-([0-9]{8,})", path.name)
    return int(name[1]) if name else None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where; created when first needed.
        keep: how many to keep; older ones are removed after each save.
        disk: does the work; replaced by tests that make it fail or stop midway.
    """

    def __init__(self, folder: Path, keep: int = 2, disk: Disk | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.disk = disk or Disk()
        self._damaged: set[int] = set()
        """Steps whose checkpoint was passed over."""
        self.remarks: list[str] = []
        """Warnings about old checkpoints that cannot be deleted; the caller takes them out."""
        self._has_warned = False

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, newest first."""
        if not self.folder.is_dir():
            return []
        steps = (step_of(path) for path in self.folder.iterdir())
        return sorted((step for step in steps if step is not None), reverse=True)

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint: `begin`, `fill` and `commit` at once, of whole tensors.

        Raises:
            WorkhorseError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        tensors = {MODEL: whole(model), OPTIMIZER: whole(optimizer)}
        try:
            self.begin(step, tensors)
            self.fill(step, tensors)
            return self.commit(step, state)
        except WorkhorseError:
            self.give_up()
            raise

    def begin(self, step: int, tensors: Tensors) -> None:
        """Make a checkpoint's files of tensors, without their bytes, under a temporary name.

        Args:
            step: training steps done.
            tensors: by name, of `MODEL`, a shared weight once, and of `OPTIMIZER`.

        Raises:
            WorkhorseError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        with self._in_one_line(step) as folder:
            self.clean()
            if os.path.lexists(folder):  # it could not be deleted
                self.disk.rename(folder, self._aside(folder))
            self.disk.make_folder(folder)
            for name, slices in tensors.items():
                self.disk.lay_out(folder / name, slices)

    def fill(self, step: int, tensors: Tensors) -> None:
        """Write rows into files that were begun, here or by another process.

        Raises:
            WorkhorseError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        with self._in_one_line(step) as folder:
            for name, slices in tensors.items():
                self.disk.fill(folder / name, slices)
            for name in tensors:
                self.disk.sync(folder / name)

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        """Give a checkpoint its name, when all rows are written; then remove those beyond `keep`.

        Only this one and older ones count. Newer ones, which a run left behind when it went back
        because they were damaged, stay until their step comes again: what is whole in them is not
        lost, and they displace nothing.

        Args:
            step: training steps done.
            state: data that JSON can express.

        Raises:
            WorkhorseError: the disk is full or refuses; earlier checkpoints are untouched.
        """
        final = self.path(step)
        with self._in_one_line(step) as folder:
            self.disk.write_text(folder / STATE, json.dumps(state, indent=1))
            self.disk.sync(folder / STATE)
            self.disk.write_text(folder / MANIFEST, manifest_of(folder, step))
            self.disk.sync(folder / MANIFEST)
            self.disk.sync(folder)
            if final.exists():  # damaged: this run went back behind it
                self._discard(final)
            self.disk.rename(folder, final)
            self.disk.sync(self.folder)
        self._damaged.discard(step)
        self.prune(step)
        return final

    def give_up(self) -> None:
        """Remove what there is of a checkpoint that cannot be finished."""
        with contextlib.suppress(OSError):  # the first failure is the one to report
            self.clean()

    @contextlib.contextmanager
    def _in_one_line(self, step: int) -> Iterator[Path]:
        """The temporary folder of a checkpoint; what the disk refuses is told in one line."""
        final = self.path(step)
        try:
            yield self.folder / f"{TEMPORARY}{final.name}"
        except OSError as error:
            raise WorkhorseError(self._failure(final, error)) from error

    def prune(self, step: int) -> None:
        """Of the checkpoints up to a step, which is whole, remove the oldest beyond `keep`.

        Those that were found damaged go first, since the next process would count them. One that
        cannot be deleted is a remark.
        """
        steps: list[int] = []
        with self._deleting(self.folder):
            steps = [found for found in self.steps() if found <= step]
        kept = [found for found in steps if found not in self._damaged][: self.keep]
        for old in steps:
            if old not in kept:
                with self._deleting(self.path(old)):
                    self._discard(self.path(old))

    def newest(self, on_skip: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """The newest whole checkpoint, for a run that goes on; None if there is none.

        Args:
            on_skip: called with a line for each newer one that is damaged.
        """
        return self._newest(self.load, on_skip)

    def newest_state(
        self, on_skip: Callable[[str], None] = lambda line: None, *, alone: bool = False
    ) -> tuple[int, dict[str, Any]] | None:
        """The step and the state of the newest whole checkpoint, its tensors checked but not read.

        Args:
            on_skip: as in `newest`.
            alone: only the state need be whole; the tensors are not checked.
        """
        names = (STATE,) if alone else (MODEL, OPTIMIZER, STATE)

        def state(step: int) -> tuple[int, dict[str, Any]]:
            with open_checkpoint(self.path(step), step, names) as opened:
                return step, opened.state()

        return self._newest(state, on_skip)

    def newest_model(
        self, on_skip: Callable[[str], None] = lambda line: None
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole weights and their state, see `load_model`; None if there are none."""
        return self._newest(self.load_model, on_skip)

    def newest_weights(self) -> int | None:
        """The newest step whose weights are whole, whatever the state of its optimizer."""

        def checked(step: int) -> int:
            self.check(step, (MODEL, STATE))
            return step

        return self._newest(checked)

    def newest_folder(self, read: Callable[[Path], Found]) -> Found | None:
        """What `read` gives for the newest checkpoint's folder, whole or damaged; None if none."""

        def found(step: int) -> Found:
            made = read(self.path(step))
            if not os.path.lexists(self.path(step)):  # no file is listed of a folder that is gone
                raise _RemovedError
            return made

        return self._newest(found)

    def _newest(
        self, read: Callable[[int], Found], on_skip: Callable[[str], None] = lambda line: None
    ) -> Found | None:
        """What `read` gives for the newest step that is not damaged.

        A run that is training removes the oldest after each save. If that is the one being read,
        there is a newer one, and the steps are listed again.

        Raises:
            WorkhorseError: one after another was removed before it was read; or `read` raises it.
        """
        for _ in range(LOOKS):
            skipped: list[str] = []
            with contextlib.suppress(_RemovedError):
                found = self._first_whole(read, skipped.append)
                used = "" if found is None else f"; step {found[0]} is used instead"
                for line in skipped:
                    on_skip(line + used)
                return None if found is None else found[1]
        raise WorkhorseError(
            f"each checkpoint in {self.folder} was removed before it was read; wait for the end of "
            "the training there, or resume it with train.keep=5"
        )

    def _first_whole(
        self, read: Callable[[int], Found], on_skip: Callable[[str], None]
    ) -> tuple[int, Found] | None:
        for step in self.steps():
            try:
                return step, read(step)
            except (WorkhorseError, OSError) as error:
                if not os.path.lexists(self.path(step)):
                    raise _RemovedError from error
                if not isinstance(error, DamagedCheckpoint):
                    raise
                self._damaged.add(step)
                on_skip(f"skipping {error.path}: {error.reason}")
        return None

    def load(self, step: int) -> Checkpoint:
        """Read and check one checkpoint.

        Raises:
            DamagedCheckpoint: a missing, shortened or changed file.
        """
        with open_checkpoint(self.path(step), step, (MODEL, OPTIMIZER, STATE)) as opened:
            return Checkpoint(
                step, opened.tensors(MODEL), opened.tensors(OPTIMIZER), opened.state()
            )

    def load_model(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and check the weights and the state of one checkpoint, without the optimizer.

        Raises:
            DamagedCheckpoint: a missing, shortened or changed file.
        """
        with open_checkpoint(self.path(step), step, (MODEL, STATE)) as opened:
            return opened.tensors(MODEL), opened.state()

    def check(self, step: int, names: tuple[str, ...] = (MODEL, OPTIMIZER, STATE)) -> None:
        """Compare the named files with the manifest, byte for byte.

        Raises:
            DamagedCheckpoint: they differ, or the manifest is not as it was written.
        """
        with open_checkpoint(self.path(step), step, names):
            pass

    def clean(self) -> None:
        """Delete the remains of interrupted saves and deletions, except those that cannot be."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if LEFTOVER.fullmatch(path.name):
                    with self._deleting(path):
                        self.disk.remove(path)

    def _discard(self, checkpoint: Path) -> None:
        """Delete a checkpoint so that no part of it ever has its name.

        Raises:
            OSError: it still has its name.
        """
        doomed = self._aside(checkpoint)
        self.disk.rename(checkpoint, doomed)
        with self._deleting(doomed):
            self.disk.remove(doomed)

    def _aside(self, path: Path) -> Path:
        """A new name for a folder that is to be deleted."""
        name = path.name.removeprefix(TEMPORARY)
        return self.folder / f"{TEMPORARY}removed-{name}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def _deleting(self, path: Path) -> Iterator[None]:
        """Turn a failure to delete into one remark: a run must not end because of it."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self.remarks.append(
                    f"cannot delete {path}: {error.strerror or error}; training continues, and "
                    "each later save tries again"
                )

    def _failure(self, final: Path, error: OSError) -> str:
        reason, remedy = refusal(error)
        last = ""
        with contextlib.suppress(OSError):  # the first failure is the one to report
            names = [self.path(step).name for step in self.steps()]
            last = f"the newest there is {names[0]}; " if names else "there is none yet; "
        return (
            f"cannot write checkpoint {final}: {reason}; {last}{remedy}, then run again with "
            "--resume"
        )


class _RemovedError(Exception):
    """A checkpoint that was listed no longer exists."""
