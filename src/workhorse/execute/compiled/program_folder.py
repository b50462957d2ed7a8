"""The folder of compiled programs. Reading a program runs code, so only its user may write there.

The folder (mode 0700) and its files (0600) belong to the user and are closed to everybody else. A
file that is not is never read.
"""

import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS = 0o077
"""Permission bits of anybody but the owner."""


class ProgramFolder:
    """Programs by name.

    Args:
        path: of the folder; created when the first program is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BufferedReader | None:
        """A program's file, or None if there is none; one that cannot be trusted is logged."""
        try:
            self._secure(make=False)
            file = open(self.path / name, "rb", opener=_without_following)  # noqa: SIM115
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a compiled step is not read: %s", error)
            return None
        if reason := _why_not_private(os.fstat(file.fileno())):
            log.warning("%s is not read and made again: %s", self.path / name, reason)
            file.close()
            return None
        return file

    def keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Keep a program, whole or not at all; a failure is logged.

        Args:
            name: of the program.
            write: writes it to an existing empty file.
        """
        temporary = self.path / f".tmp-{os.getpid()}-{name}"
        try:
            self._secure(make=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            write(temporary)
            temporary.replace(self.path / name)
        except OSError as error:
            log.warning("the compiled step is not kept: %s", error)
        finally:
            with suppress(OSError):  # still there if writing failed
                temporary.unlink()

    def _secure(self, *, make: bool) -> None:
        """Close the folder to everybody else; raise OSError unless it is the user's."""
        if make:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(
                f"{self.path} is not a folder of this user; remove it, or set XDG_CACHE_HOME"
            )
        if found.st_mode & _OTHERS:  # from an older version, or made by hand
            self.path.chmod(0o700)


def _without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _why_not_private(found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & _OTHERS:
        return f"others may use it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None
