"""One process at a time in a run directory."""

import errno
import os
import stat
from pathlib import Path
from typing import Self

from workhorse.errors import WorkhorseError

try:
    import fcntl
except ImportError:  # Windows has no flock: there two processes are not kept apart
    fcntl = None

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Refuse a symbolic link; Windows has no such flag."""


class FolderLock:
    """A lock held while open. The system releases it when the process ends, however it ends.

    It locks the folder, which may be moved meanwhile, not the path. The file `.lock` names the
    process, and is the lock on file systems that cannot lock a folder (NFS).

    Raises:
        WorkhorseError: another process holds it, or `.lock` is a link: writing the lock would
            change somebody else's file.
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
            except OSError:
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
        """Whether the locked folder still has its path; True if folders cannot be locked."""
        if self._folder is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._folder))
        except OSError:
            return False

    def folder_now(self) -> Path | None:
        """Where the locked folder is now; None: removed, or the system does not tell."""
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
    return WorkhorseError(f"{file} is a link or no plain file; remove it")
