"""Atomic writes of files and folders, file locks, and errors about failed writes."""

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
"""Values of errno when a file cannot grow: full disk, disk quota, or limit on file sizes."""
TEMPORARY = ".workhorse-tmp-"
"""Prefix of the temporary name of a file or folder during a write, before 16 hexadecimal digits."""
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
STALE = 60
"""Age in seconds at which a temporary file or folder is deleted if no process holds its lock."""


class CannotWriteError(WorkhorseError):
    """Error: a file or folder cannot be written. The message has the path, reason and remedy."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(f"cannot write {path}: {reason}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in a `with` block into an error that names the path and the remedy.

    If blocks are nested, the error names the path of the outer block, because the inner path is
    often temporary.

    Raises:
        CannotWriteError: the block raised an OSError.
    """
    try:
        yield
    except CannotWriteError as error:
        raise CannotWriteError(path, error.reason) from error
    except OSError as error:
        reason, remedy = refusal(error)
        raise CannotWriteError(path, f"{reason}; {remedy}") from error


def refusal(error: OSError) -> tuple[str, str]:
    """Return the reason why a write failed, and the remedy, for the error message."""
    if error.errno is None:  # NumPy's error for an incomplete write has no errno
        return f"only a part was written ({error})", "free some disk space"
    remedy = "choose another path, or give yourself write permission"
    if error.errno in DISK_FULL:
        remedy = "free some disk space"
    elif error.errno == errno.EIO:
        remedy = "check the disk, or choose another path"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on file sizes (ulimit -f), or choose another path"
    return error.strerror or str(error), remedy


@contextlib.contextmanager
def one_process_at_a_time(place: Path, patience: float = math.inf) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder; other processes and threads wait for it.

    Args:
        place: a file that this user may write, or a folder.
        patience: maximum number of seconds to wait. After that, or on systems without `flock`
            (Windows), the block runs without the lock.

    Raises:
        OSError: the file or folder cannot be opened or locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    # Network file systems only lock files that are open for writing.
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
    """Write a file or folder atomically: under a temporary name beside `path`, then renamed.

    The temporary name is random, so no other file is touched, and several processes that write to
    the same path do not disturb each other. If the block succeeds, everything is synced and
    renamed: a file replaces the file at `path`, a folder replaces an empty folder. If the block
    fails, its output is deleted.

    A killed process leaves its temporary file or folder. The next `replacing` in the same folder
    deletes it if it is older than `STALE` seconds and no process holds its lock.

    Args:
        path: the final path. For a folder, its parent folders are created if needed.
        folder: True yields an empty folder, False an empty file.

    Raises:
        CannotWriteError: the write fails, or `path` is a folder that is not empty.
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
                with contextlib.suppress(OSError):  # file systems without locks
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
    """Return True if the path has a temporary name given by `replacing`."""
    return path.name.startswith(TEMPORARY)


def _temporary(path: Path) -> Path:
    """Return a new random temporary path in the same folder as `path`."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")


def _delete_stale(folder: Path) -> None:
    """Delete the temporary files of killed processes in a folder; errors are ignored."""
    try:
        import fcntl
    except ImportError:  # without locks it is unknown whether a file is in use
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
    """Delete a file or folder atomically: it is renamed first, so no partial folder is visible.

    If the deletion fails, the remaining files have a temporary name, and a later `replacing` in the
    same folder deletes them.

    Raises:
        OSError: the rename failed.
    """
    doomed = path.rename(_temporary(path))
    with contextlib.suppress(OSError):
        _delete(doomed)


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file atomically: on failure, an existing file stays unchanged.

    Raises:
        CannotWriteError: the write fails, or the path is a device.
    """
    with writing(path):
        _refuse_device(path)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _refuse_device(path: Path) -> None:
    in_dev = path.parent.resolve() == Path("/dev")  # such as /dev/stdout, a link
    if in_dev or path.is_char_device() or path.is_block_device():
        raise CannotWriteError(path, "it is a device, which would be replaced; give a file")


def check_place(path: Path) -> None:
    """Check that a file can be written at a path, before its content is computed.

    Raises:
        CannotWriteError: the path is a folder, a device or a pipe, its parent folder is missing, or
            files cannot be created there.
    """
    with writing(path):
        _refuse_device(path)
        if path.is_fifo():
            raise CannotWriteError(path, "it is a pipe, which would be replaced; give a file")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk (fsync)."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and keeps them consistent by itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
