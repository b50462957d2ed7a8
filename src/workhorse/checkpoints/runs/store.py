"""Checkpoints in a folder: written atomically, and verified before use.

    step-00001000/
        model.safetensors       weights by parameter name
        optimizer.safetensors   the optimizer's tensors
        state.json              everything else: counters, random states, the model's config
        manifest.json           size and SHA-256 of the other files; written last

A checkpoint is written under a temporary name, synced, and renamed. So a folder with its final name
was complete when it was written. The manifest shows whether it is still intact.

A checkpoint is renamed to a temporary name before it is deleted. If the deletion fails, the save
still succeeds, `remarks` gets one line, and each later save tries again.
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
"""Temporary names of this module. Leftover folders are only deleted if they have such a name."""
LOOKS = 100
"""Maximum number of attempts to read checkpoints while a running training removes them."""

Found = TypeVar("Found")
Tensors = Mapping[str, Slices]
"""The slices of tensors that this process writes, by file name."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that was read into memory; its tensors are on the CPU."""

    step: int
    """Number of training steps completed."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint folder; None for other folders."""
    name = re.fullmatch(r"step-([0-9]{8,})", path.name)
    return int(name[1]) if name else None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: folder of the checkpoints; created when it is first needed.
        keep: number of checkpoints to keep; older ones are removed after each save.
        disk: the file operations; tests replace them to simulate failures and interruptions.
    """

    def __init__(self, folder: Path, keep: int = 2, disk: Disk | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.disk = disk or Disk()
        self._damaged: set[int] = set()
        """Steps of the checkpoints that were skipped as damaged."""
        self.remarks: list[str] = []
        """Warnings about old checkpoints that cannot be deleted; the caller clears the list."""
        self._has_warned = False

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, newest first."""
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
        """Write a checkpoint of whole tensors: `begin`, `fill` and `commit` in one call.

        Raises:
            WorkhorseError: the disk is full or cannot be written; older checkpoints are unchanged.
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
        """Create a checkpoint's tensor files at their final size; `fill` writes the tensors.

        Args:
            step: number of training steps completed.
            tensors: for each of the files `MODEL` and `OPTIMIZER`, the slices by tensor name. A
                shared weight is listed once.

        Raises:
            WorkhorseError: the disk is full or cannot be written; older checkpoints are unchanged.
        """
        with self._in_one_line(step) as folder:
            self.clean()
            if os.path.lexists(folder):  # left by an earlier save; `clean` could not delete it
                self.disk.rename(folder, self._aside(folder))
            self.disk.make_folder(folder)
            for name, slices in tensors.items():
                self.disk.lay_out(folder / name, slices)

    def fill(self, step: int, tensors: Tensors) -> None:
        """Write slices of tensors into files that this or another process created with `begin`.

        Raises:
            WorkhorseError: the disk is full or cannot be written; older checkpoints are unchanged.
        """
        with self._in_one_line(step) as folder:
            for name, slices in tensors.items():
                self.disk.fill(folder / name, slices)
            for name in tensors:
                self.disk.sync(folder / name)

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        """Finish a checkpoint: write its state, rename it to its final name, and call `prune`.

        If the run resumed from an older step, because newer checkpoints are damaged, these stay
        until their step is saved again. They do not count towards `keep`.

        Args:
            step: number of training steps completed.
            state: data that JSON can represent.

        Raises:
            WorkhorseError: the disk is full or cannot be written; older checkpoints are unchanged.
        """
        final = self.path(step)
        with self._in_one_line(step) as folder:
            self.disk.write_text(folder / STATE, json.dumps(state, indent=1))
            self.disk.sync(folder / STATE)
            self.disk.write_text(folder / MANIFEST, manifest_of(folder, step))
            self.disk.sync(folder / MANIFEST)
            self.disk.sync(folder)  # before the rename: a folder with its final name is whole
            if final.exists():  # damaged: the run resumed from an older step
                self._discard(final)
            self.disk.rename(folder, final)
            self.disk.sync(self.folder)
        self._damaged.discard(step)
        self.prune(step)
        return final

    def give_up(self) -> None:
        """Remove the files of a checkpoint that cannot be finished."""
        with contextlib.suppress(OSError):  # the first failure is the one to report
            self.clean()

    @contextlib.contextmanager
    def _in_one_line(self, step: int) -> Iterator[Path]:
        """Yield the temporary folder of a checkpoint, and turn OSErrors into WorkhorseErrors."""
        final = self.path(step)
        try:
            yield self.folder / f"{TEMPORARY}{final.name}"
        except OSError as error:
            raise WorkhorseError(self._failure(final, error)) from error

    def prune(self, step: int) -> None:
        """Remove old checkpoints: of those up to `step`, the newest `keep` remain.

        Known damaged checkpoints do not count, and are removed too. If a checkpoint cannot be
        deleted, a warning is added to `remarks`.
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
        """Load the newest undamaged checkpoint, to resume from; None if there is none.

        Args:
            on_skip: called with a message for each newer checkpoint that is damaged.
        """
        return self._newest(self.load, on_skip)

    def newest_state(
        self, on_skip: Callable[[str], None] = lambda line: None, *, alone: bool = False
    ) -> tuple[int, dict[str, Any]] | None:
        """Return the step and the state of the newest undamaged checkpoint, or None.

        The checkpoint's tensors are verified but not loaded.

        Args:
            on_skip: called with a message for each newer checkpoint that is damaged.
            alone: True to verify only the state; the tensors may be damaged.
        """
        names = (STATE,) if alone else (MODEL, OPTIMIZER, STATE)

        def state(step: int) -> tuple[int, dict[str, Any]]:
            with open_checkpoint(self.path(step), step, names) as opened:
                return step, opened.state()

        return self._newest(state, on_skip)

    def newest_model(
        self, on_skip: Callable[[str], None] = lambda line: None
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Load the newest undamaged weights and their state; return None if there are none."""
        return self._newest(self.load_model, on_skip)

    def newest_weights(self) -> int | None:
        """Return the newest step with undamaged weights and state, or None."""

        def checked(step: int) -> int:
            self.check(step, (MODEL, STATE))
            return step

        return self._newest(checked)

    def newest_folder(self, read: Callable[[Path], Found]) -> Found | None:
        """Return `read(folder)` for the newest checkpoint, even if it is damaged, or None."""

        def found(step: int) -> Found:
            made = read(self.path(step))
            if not os.path.lexists(
                self.path(step)
            ):  # listing a removed folder finds no files and raises nothing
                raise _RemovedError
            return made

        return self._newest(found)

    def _newest(
        self, read: Callable[[int], Found], on_skip: Callable[[str], None] = lambda line: None
    ) -> Found | None:
        """Return `read(step)` for the newest step with an undamaged checkpoint, or None.

        A running training removes old checkpoints. If a checkpoint is removed while it is being
        read, the checkpoints are listed again, because there is a newer one.
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
            f"each checkpoint in {self.folder} was removed before it was read; wait until the "
            "run's training ends"
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
            DamagedCheckpoint: a file is missing, truncated or changed.
        """
        with open_checkpoint(self.path(step), step, (MODEL, OPTIMIZER, STATE)) as opened:
            return Checkpoint(
                step, opened.tensors(MODEL), opened.tensors(OPTIMIZER), opened.state()
            )

    def load_model(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read and check the weights and the state of one checkpoint, without the optimizer.

        Raises:
            DamagedCheckpoint: a file is missing, truncated or changed.
        """
        with open_checkpoint(self.path(step), step, (MODEL, STATE)) as opened:
            return opened.tensors(MODEL), opened.state()

    def check(self, step: int, names: tuple[str, ...] = (MODEL, OPTIMIZER, STATE)) -> None:
        """Verify the sizes and checksums of the named files of a checkpoint.

        Raises:
            DamagedCheckpoint: a file or the manifest was changed after it was written.
        """
        with open_checkpoint(self.path(step), step, names):
            pass

    def clean(self) -> None:
        """Delete the remains of interrupted saves and deletions; a failure only adds a warning."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if LEFTOVER.fullmatch(path.name):
                    with self._deleting(path):
                        self.disk.remove(path)

    def _discard(self, checkpoint: Path) -> None:
        """Delete a checkpoint, renamed first so that no partly deleted one is ever loaded."""
        doomed = self._aside(checkpoint)
        self.disk.rename(checkpoint, doomed)
        with self._deleting(doomed):
            self.disk.remove(doomed)

    def _aside(self, path: Path) -> Path:
        """A new temporary path for a folder that will be deleted."""
        name = path.name.removeprefix(TEMPORARY)
        return self.folder / f"{TEMPORARY}removed-{name}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def _deleting(self, path: Path) -> Iterator[None]:
        """Turn errors in deleting `path` into a warning, so that they do not end the training."""
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
            last = f"the newest saved is {names[0]}; " if names else "none is saved yet; "
        return (
            f"cannot write checkpoint {final}: {reason}; {last}{remedy}, then run again with "
            "--resume"
        )


class _RemovedError(Exception):
    """Raised if a checkpoint was removed after it was listed."""
