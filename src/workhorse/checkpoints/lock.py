"""One process at a time in a run directory."""

import os
from pathlib import Path
from typing import Self

from workhorse.errors import WorkhorseError

try:
    import fcntl
except ImportError:  # Windows has no flock: there two processes are not kept apart
    fcntl = None


class FolderLock:
    """Held while open. The system lets go of it when the process ends, however it ends.

    Raises:
        WorkhorseError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode() or "unknown"
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
