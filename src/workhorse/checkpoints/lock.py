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
    """Held while open. The system lets go of it when the process ends, however it ends.

    Raises:
        WorkhorseError: another process holds it, or `.lock` is a link: the file that it leads to
            is somebody's, and a lock would be written into it.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / ".lock"
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_ours(file) from None
            raise
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(self._descriptor)
            raise _not_ours(file)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode(errors="replace") or "unknown"
            os.close(self._descriptor)
            raise WorkhorseError(
                f"{folder} is in use by another training process (pid {holder}); "
                "wait for it, or choose another --out"
            ) from None
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _not_ours(file: Path) -> WorkhorseError:
    return WorkhorseError(f"{file} is a link or no plain file; remove it")
