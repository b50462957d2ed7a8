"""The directory of a training run, and the lock that lets only one process train in it."""

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from workhorse.checkpoints.runs.manifest import Disk
from workhorse.checkpoints.runs.store import Checkpoint, CheckpointStore, step_of
from workhorse.config.base import ConfigError, read_yaml
from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import read_json, to_path
from workhorse.files.writing import TEMPORARY, write_atomically
from workhorse.nn import DecoderConfig

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

try:
    import fcntl
except ImportError:  # Windows has no flock: there the folder is not locked
    fcntl = None

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Flag that makes `os.open` fail on a symbolic link; Windows does not have it."""


class FolderLock:
    """A lock on a folder, until `release` or the end of the process.

    The lock stays valid if the folder is moved. The file `.lock` in it contains the process id. On
    file systems that cannot lock a folder (NFS), only this file is locked.

    Raises:
        WorkhorseError: another process holds the lock, or `.lock` is a link, so that writing to it
            would change another file.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / ".lock"
        self._path = folder
        self._folder: int | None = None
        try:
            self._file: int | None = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_ours(file) from None
            raise
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            self.release()
            raise _not_ours(file)
        if fcntl is None:
            return
        self._folder = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # the file system cannot lock folders; `.lock` is locked already
                pass
        except BlockingIOError:
            holder = os.pread(self._file, 20, 0).decode(errors="replace") or "unknown"
            self.release()
            raise WorkhorseError(
                f"{folder} is in use by another training process (pid {holder}); "
                "wait for it, or choose another --out"
            ) from None
        os.truncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def in_place(self) -> bool:
        """True if the locked folder is still at its path, or if folders cannot be locked."""
        if self._folder is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._folder))
        except OSError:
            return False

    def folder_now(self) -> Path | None:
        """The current path of the locked folder; None if the folder was removed or not found."""
        try:
            now = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
        except OSError:
            return None
        return now if now.is_dir() else None

    def release(self) -> None:
        """Release the lock."""
        for descriptor in (self._folder, self._file):
            if descriptor is not None:
                os.close(descriptor)
        self._folder = self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _not_ours(file: Path) -> WorkhorseError:
    return WorkhorseError(f"{file} is a link or not a regular file; remove it")


DAMAGED_RECIPE = "restore the recipe that the run was started with"


class RunDirectory:
    """The folder of a run: its recipe and its results.

        recipe.yaml     the recipe, including overrides and defaults
        config.json     the decoder's config
        tokenizer/
        data/           token shards, unless the recipe stores them elsewhere
        metrics.jsonl
        checkpoints/
        report.html

    Args:
        path: the folder; nothing is read or created before it is needed.
        step: step of the checkpoint to load. By default, the newest undamaged checkpoint is loaded,
            with a warning in `remarks` for each damaged one that is skipped.
    """

    has_tokenizer = True

    def __init__(self, path: str | Path, step: int | None = None) -> None:
        self.path = to_path(path, "a run directory is a path")
        self.step = step
        self.recipe_file = self.path / "recipe.yaml"
        self.config_file = self.path / "config.json"
        self.tokenizer_folder = self.path / "tokenizer"
        self.data_folder = self.path / "data"
        self.reference_folder = self.path / "reference"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints_folder = self.path / "checkpoints"
        self.report_file = self.path / "report.html"
        self.remarks: list[str] = []
        """Warnings from loading the run."""
        self._made: list[Path] = []
        self._found_data = False
        self._lock: FolderLock | None = None

    @classmethod
    def at(cls, path: Path) -> Self:
        """The run in a folder, or the run of a checkpoint's folder."""
        step = step_of(path.absolute())
        run = cls(os.path.normpath(path / ".." / ".."), step)
        return cls(path) if step is None or not run.exists else run

    @property
    def exists(self) -> bool:
        """True if the folder contains a run."""
        return self.recipe_file.is_file()

    def keeps(self, path: Path) -> bool:
        """True if a path is inside the folder of the run's checkpoints, data or tokenizer."""
        own = (self.checkpoints_folder, self.data_folder, self.tokenizer_folder)
        return self.exists and any(path.resolve().is_relative_to(f.resolve()) for f in own)

    def lock(self) -> FolderLock:
        """Create the folder if needed, and lock it against training by other processes.

        Raises:
            WorkhorseError: another process holds the lock, or the folder cannot be created.
        """
        try:
            self._made = [
                folder for folder in (self.path, *self.path.parents) if not folder.exists()
            ]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise self._unfit(error.strerror) from None
        return self._lock

    def check_place(self) -> None:
        """Check that the locked folder was not moved, since a save would then create another one.

        Raises:
            WorkhorseError: the folder was moved or removed; the message names its last checkpoint.
        """
        if self._lock is None or self._lock.in_place():
            return
        moved = f"{self.path} was moved or removed during training"
        if (now := self._lock.folder_now()) is None:
            raise WorkhorseError(
                f"{moved}; its checkpoints moved with it: resume in the new folder with --resume"
            )
        store = RunDirectory(now).store()
        steps = store.steps()
        last = f"its last checkpoint is {store.path(steps[0])}" if steps else "it has no checkpoint"
        going_on = shlex.join(["workhorse", "train", str(now), "--resume"])
        raise WorkhorseError(f"{moved}; {last}: resume with {going_on}")

    def check_free(self) -> None:
        """Check that a new run can start in this folder, without changing anything.

        Raises:
            WorkhorseError: the folder contains a run or other files, or it cannot be created.
        """
        if not self.path.is_dir():
            there = self._first_above()
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise self._unfit(os.strerror(errno.EACCES))
            return
        if self.exists:
            raise WorkhorseError(
                f"{self.path} already contains a run; resume it with --resume, or "
                "choose another --out"
            )
        others = [
            path.name
            for path in self.path.iterdir()
            if path != self.data_folder and not path.name.startswith(".")
        ]  # `workhorse data prepare` may have written the data
        if others:
            raise WorkhorseError(
                f"{self.path} is not empty and not a run (it contains {min(others)!r}); "
                "choose another --out"
            )

    def _first_above(self) -> Path:
        """The path itself if it exists, otherwise its nearest existing ancestor."""
        return next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))

    def _unfit(self, reason: str | None) -> WorkhorseError:
        """Return the error for a folder that cannot be created or written."""
        there = self._first_above()
        if not there.is_dir():
            what = "it" if there == self.path else there
            reason = f"{what} is {'a file' if there.exists() else 'a dangling link'}"
        return WorkhorseError(
            f"cannot write in the run directory {self.path}: {reason}; choose another --out"
        )

    def begin(self, recipe_yaml: str) -> None:
        """Start a run in the folder by writing its recipe.

        Raises:
            WorkhorseError: see `check_free`.
        """
        self.check_free()
        self._found_data = self.data_folder.exists()
        try:
            write_atomically(self.recipe_file, recipe_yaml)
        except WorkhorseError:
            self.undo()
            raise

    def undo(self, *, keep_data: bool = False) -> None:
        """Remove everything that was created since `begin`.

        Data that existed before is kept, and so are dot files except `.lock` and temporary files.

        Args:
            keep_data: True to keep all data.
        """
        for path in self.path.iterdir():
            if path == self.data_folder and (keep_data or self._found_data):
                continue
            if (
                path.name.startswith(".")
                and path.name != ".lock"
                and not path.name.startswith(TEMPORARY)
            ):
                continue
            Disk().remove(path)
        with contextlib.suppress(
            OSError
        ):  # it contains other files, or is the working directory of a process
            for folder in self._made:
                folder.rmdir()

    def rewrite_recipe(self, recipe_yaml: str) -> None:
        write_atomically(self.recipe_file, recipe_yaml)

    def store(self, keep: int = 2) -> CheckpointStore:
        return CheckpointStore(self.checkpoints_folder, keep)

    def recipe(self) -> dict[str, Any]:
        """The content of `recipe.yaml` as plain data.

        Raises:
            WorkhorseError: this is not a run directory, or the file is not a recipe.
        """
        self._check_is_run()
        try:
            recipe = read_yaml(self.recipe_file)
        except ConfigError as error:
            raise WorkhorseError(f"{error}; {DAMAGED_RECIPE}") from None
        if not isinstance(recipe.get("data"), dict):
            raise WorkhorseError(f"{self.recipe_file} has no section 'data'; {DAMAGED_RECIPE}")
        return recipe

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config. Each access reads `config.json` again.

        Raises:
            WorkhorseError: this is not a run directory, or the file is damaged.
        """
        self._check_is_run()
        if not self.config_file.exists():
            raise WorkhorseError(
                f"{self.path} has no {self.config_file.name}, because training stopped before the "
                "model was built; train it with --resume"
            )
        try:
            return DecoderConfig.from_dict(read_json(self.config_file))
        except WorkhorseError as error:
            raise WorkhorseError(
                f"{self.config_file} is damaged: {error}; --resume writes it again"
            ) from None

    def save_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Save the tokenizer's files atomically."""
        tokenizer.save(self.tokenizer_folder)

    def save_config(self, config: DecoderConfig) -> None:
        write_atomically(self.config_file, config.to_json() + "\n")

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that the model was trained with.

        Raises:
            WorkhorseError: the run or tokenizer is missing, or the newest checkpoint was trained
                with another tokenizer.
        """
        from workhorse.tokenizers import load_tokenizer

        self._check_is_run()
        tokenizer = load_tokenizer(self.tokenizer_folder)
        _, state = self.store().newest_state(alone=True) or (0, {})
        expected = state.get("tokenizer")
        if expected is not None and tokenizer.fingerprint != expected:
            raise WorkhorseError(
                f"{self.tokenizer_folder} is not the tokenizer that the checkpoints in "
                f"{self.path} were trained with; restore the original one"
            )
        return tokenizer

    @property
    def base(self) -> str | None:
        """Path or hub id of the model that the run trained an adapter for; None without one."""
        _, state = self.store().newest_state(alone=True) or (0, {})
        return state["base"]["init"] if "base" in state else None

    def checkpoint(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """Load the checkpoint, including the optimizer's state; return None if there is none.

        Args:
            notify: called with a message for each damaged checkpoint that is skipped.
        """
        store = self.store()
        return store.newest(notify) if self.step is None else store.load(self.step)

    def weights(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Read the weights and the state of the checkpoint `step`, or of the newest undamaged one.

        Raises:
            WorkhorseError: there is no such checkpoint, or all checkpoints are damaged.
        """
        store = self.store()
        if self.step is not None:
            if self.step not in store.steps():
                raise WorkhorseError(
                    f"{self.path} has no checkpoint of step {self.step}; it has {store.steps()}"
                )
            return store.load_model(self.step)
        if (found := store.newest_model(self.remarks.append)) is not None:
            return found
        if steps := store.steps():
            reason = "; ".join(self.remarks)
            raise WorkhorseError(
                f"each of the {len(steps)} checkpoints in {self.path} is damaged ({reason}); "
                "restore their files from a copy"
            )
        remedy = "restore its checkpoints" if self._has_saved() else "train it with --resume"
        raise WorkhorseError(f"{self.path} has no complete checkpoint; {remedy}")

    def _has_saved(self) -> bool:
        """True if `metrics.jsonl` records that a checkpoint was saved."""
        if not self.metrics_file.is_file():
            return False
        return b'"kind": "checkpoint"' in self.metrics_file.read_bytes()

    def _check_is_run(self) -> None:
        if not self.exists:
            weights = any(self.path.glob("*.safetensors"))
            if weights and not (self.path / "config.json").exists():
                raise WorkhorseError(
                    f"{self.path} has weights but no config.json; add the model's config.json"
                )
            raise WorkhorseError(
                f"{self.path} is not a run directory: it has no {self.recipe_file.name}; "
                "give the --out folder of workhorse train"
            )
