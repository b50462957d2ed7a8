"""Writing files, each whole or not at all, by one process at a time, and why one could not be."""

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from workhorse.errors import WorkhorseError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
TAKES_NO_MORE = {*DISK_FULL, errno.EFBIG}
"""What a file may meet while it grows; the last is of a limit on its own size."""
TEMPORARY = ".workhorse-tmp-"
"""How the name of a file or folder begins that is being written; 16 hexadecimal digits follow."""
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
STALE = 60
"""Seconds after which a temporary name that nobody has locked is deleted."""


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
        reason, remedy = refusal(error)
        raise CannotWriteError(path, f"{reason}; {remedy}") from error


def refusal(error: OSError) -> tuple[str, str]:
    """Why the system refused to write, and what to do."""
    if error.errno is None:  # NumPy's error of a file that took only a part has no number
        return f"the disk took only a part ({error})", "make room there"
    remedy = "choose another place, or allow writing there"
    if error.errno in DISK_FULL:
        remedy = "make room there"
    elif error.errno == errno.EIO:
        remedy = "check the disk, or choose another place"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on a file's size (ulimit -f), or choose another place"
    return error.strerror or str(error), remedy


@contextlib.contextmanager
def one_process_at_a_time(place: Path, patience: float = math.inf) -> Iterator[None]:
    """Let one process or thread work at a file or folder: the others wait.

    Args:
        place: a file that this user may write, or a folder.
        patience: seconds after which one that waits goes on all the same, as where the system has
            no `flock` (Windows).

    Raises:
        OSError: the place cannot be opened or locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    # Network folders lock only what is open for writing.
    descriptor = os.open(place, os.O_RDONLY if place.is_dir() else os.O_RDWR)
    end = time.monotonic() + patience
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Write a file or folder under a new name beside its place; it is whole there, or absent.

    The new name is random, so nobody else's file is touched, and of several processes that write to
    one place each writes its own. If the block succeeds, everything is synced and renamed: a file
    replaces the one at `path`, a folder an empty one. If the block fails, what it wrote is deleted.

    A process that is killed leaves its temporary name behind. The next `replacing` in the same
    folder deletes it, if it is older than `STALE` seconds and no process holds its lock.

    Args:
        path: the place; its folder is made if need be for a folder.
        folder: yield an empty folder instead of an empty file.

    Raises:
        CannotWriteError: the disk is full or refuses, or a folder there is not empty.
    """
    with writing(path):
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        _delete_stale(path.parent)
        temporary = _temporary(path)
        try:
            if folder:
                temporary.mkdir()
            else:
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            with contextlib.ExitStack() as held:
                with contextlib.suppress(OSError):  # the file system has no locks
                    held.enter_context(one_process_at_a_time(temporary, patience=0.1))
                yield temporary
                for inside in temporary.rglob("*") if folder else ():
                    sync(inside)
                sync(temporary)
                temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _delete(temporary)
            raise
        sync(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether `replacing` has a file or folder under this name, and so holds its lock."""
    return path.name.startswith(TEMPORARY)


def _temporary(path: Path) -> Path:
    """A new name beside a path."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")


def _delete_stale(folder: Path) -> None:
    """Delete what processes that were killed have left in a folder, as far as that can be done."""
    try:
        import fcntl
    except ImportError:  # without locks nobody knows what is in use
        return
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{TEMPORARY}*"):
            if not _TEMPORARY_NAME.fullmatch(path.name) or path.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < STALE:
                    continue
                descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _delete(path)
                finally:
                    os.close(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def discard(path: Path) -> None:
    """Delete a file or folder so that no part of it ever has its name.

    What cannot be deleted stays under a temporary name, which a later `replacing` deletes.

    Raises:
        OSError: it still has its name.
    """
    doomed = path.rename(_temporary(path))
    with contextlib.suppress(OSError):
        _delete(doomed)


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file under another name, sync it, rename it: it is whole, or what was there stays.

    Raises:
        CannotWriteError: the disk is full or refuses, or a device has that name.
    """
    with writing(path):
        _refuse_device(path)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _refuse_device(path: Path) -> None:
    if path.is_char_device() or path.is_block_device():
        raise CannotWriteError(path, "it is a device, and would be replaced; name a file")


def check_place(path: Path) -> None:
    """Refuse, before the work for it is done, a place where a file cannot be.

    Raises:
        CannotWriteError: it is a folder or a device, its own folder is missing, or a file may not
            be made there.
    """
    _refuse_device(path)
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows keeps folders in order by itself and cannot open them
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
