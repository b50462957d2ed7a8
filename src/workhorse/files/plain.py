"""Files of a folder that a stranger made: opened only where they are plain files inside it."""

import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from workhorse.errors import WorkhorseError, shown

REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENAMETOOLONG: "check the path",
    errno.EACCES: "give yourself the permission",
    errno.EPERM: "give yourself the permission",
}
"""What can be done where the system refuses a file, by the number of its error."""
_GIT_BLOB = r"[0-9a-f]{40}|[0-9a-f]{64}"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SHARED_BLOB = r"([0-9a-f]{2})/\1[0-9a-f]{62}"


def to_path(given: object, rule: str) -> Path:
    """An argument that names a file or folder, as a Path.

    Args:
        given: a string or a Path.
        rule: what it must be, which begins the message: "a folder is a path".

    Raises:
        WorkhorseError: it is neither, or no file can have that name.
    """
    if not isinstance(given, str | Path):
        raise WorkhorseError(f"{rule}, not {shown(given)}; give it as a text or a Path")
    name = str(given)
    if "\0" in name or any("\ud800" <= letter < "\udc80" for letter in name):
        raise WorkhorseError(f"{rule}, and {shown(name)} can be none; choose another name")
    return Path(given)


def unreadable(path: Path, error: OSError) -> WorkhorseError:
    """That the system refused to read a file, and what can be done."""
    remedy = REMEDIES.get(error.errno or 0, "check the disk")
    return WorkhorseError(f"cannot read {path}: {error.strerror or error}; {remedy}")


def open_contained(folder: Path, name: str, *, root: Path | None = None) -> BinaryIO:
    """Open a file that lies directly in a folder, for reading bytes, without a buffer.

    Args:
        folder: where it lies.
        name: the file's name, no path.
        root: the folder that links may not lead out of, where `folder` is a part of it.

    Raises:
        WorkhorseError: the name is a path, a link leads out of the folder, there is no plain file
            that can be read, or it is a Git LFS pointer.
    """
    if name in {"", ".", ".."} or "/" in name or "\\" in name or not name.isprintable():
        raise WorkhorseError(f"{folder}: {shown(name)} is no file name; it must lie in the folder")
    path = folder / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        if not _belongs(real, Path(os.path.realpath(root or folder))):
            raise WorkhorseError(
                f"{path} is a link out of its folder; put the file itself there if you trust it"
            )
        if not stat.S_ISREG(real.stat().st_mode):
            kind = "a folder" if real.is_dir() else "a special file"
            raise WorkhorseError(f"{path} is {kind}, not a plain file; fetch the model again")
        # What becomes a pipe after the check does not make us wait for its writer.
        file = os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        if os.pread(file.fileno(), len(_LFS_POINTER), 0) == _LFS_POINTER:
            file.close()
            raise WorkhorseError(
                f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
            )
        return file
    except FileNotFoundError:
        raise WorkhorseError(f"{path} is missing; fetch the model again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_bytes(path: Path, *, limit: int, root: Path | None = None) -> bytes:
    """The content of a file.

    Args:
        path: a plain file in its folder.
        limit: bytes it may have.
        root: as of `open_contained`.

    Raises:
        WorkhorseError: there is no such file, it leads out of its folder or is too large.
    """
    with open_contained(path.parent, path.name, root=root) as file:
        try:
            raw = file.read(limit + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from None
    if len(raw) > limit:
        raise WorkhorseError(f"{path} is larger than {limit} bytes; it is not a model's")
    return raw


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file that the user named, for reading bytes, wherever its links lead.

    Raises:
        WorkhorseError: there is no file that can be read, or it is a folder, pipe or device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's writer
    except OSError as error:
        raise unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise WorkhorseError(f"cannot read {path}: it is {kind}; name a plain file")
    return io.BufferedReader(io.FileIO(descriptor))


def read_text(path: Path, *, limit: int) -> str:
    """The UTF-8 text of a file that the user named, of at most so many bytes.

    Raises:
        WorkhorseError: as `open_plain`; or the file is larger, or no UTF-8.
    """
    with open_plain(path) as file:
        try:
            raw = file.read(limit + 1)
        except OSError as error:
            raise unreadable(path, error) from None
    if len(raw) > limit:
        raise WorkhorseError(f"{path} is larger than {limit} bytes; is it the right file?")
    return decoded(raw, str(path))


def decoded(raw: bytes, what: str) -> str:
    """UTF-8 text, or a WorkhorseError that says where it is none; `what` is its name in it."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WorkhorseError(f"{what} is not UTF-8: bad byte at offset {error.start}") from None


def _belongs(real: Path, folder: Path) -> bool:
    """Whether a file lies in a folder, or is what the Hub's cache links to from there.

    The cache keeps `CACHE/models--ORG--NAME/snapshots/COMMIT/` as links to `../../blobs/HASH`, and
    that may be a link to `CACHE/blobs/HA/HASH`, which all repositories share.
    """
    if real.is_relative_to(folder):
        return True
    snapshots, repository = folder.parent, folder.parent.parent
    if snapshots.name != "snapshots" or not repository.name.startswith("models--"):
        return False
    return any(
        real.is_relative_to(blobs) and re.fullmatch(names, real.relative_to(blobs).as_posix())
        for blobs, names in (
            (repository / "blobs", _GIT_BLOB),
            (repository.parent / "blobs", _SHARED_BLOB),
        )
    )
