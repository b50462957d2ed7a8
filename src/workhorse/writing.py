"""Writing files, each whole or not at all, and saying in one line why one could not be written."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from workhorse.errors import WorkhorseError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CannotWriteError(WorkhorseError):
    """A place that could not be written, why, and what to do."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(f"cannot write {path}: {reason}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the place, and what to do, where the system refuses to write.

    One inside another names the outer place: a temporary one means nothing to a user.

    Raises:
        CannotWriteError: it does.
    """
    try:
        yield
    except CannotWriteError as error:
        raise CannotWriteError(path, error.reason) from error
    except OSError as error:
        # NumPy's error of a file that took only a part has no number.
        full = error.errno is None or error.errno in DISK_FULL
        remedy = "make room there" if full else "choose another place, or allow writing there"
        reason = error.strerror or f"the disk took only a part ({error})"
        raise CannotWriteError(path, f"{reason}; {remedy}") from error


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file under another name, sync it, rename it: it is whole, or what was there stays.

    Raises:
        CannotWriteError: the disk is full or refuses.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # a link by that name is not followed
            with temporary.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows keeps folders in order by itself and cannot open them
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
