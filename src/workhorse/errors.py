"""Errors that a user can correct, values quoted in them, and warnings at the caller's line."""

import sys
import warnings
from pathlib import Path

_SHOWN = 80  # characters of a value in a message


class WorkhorseError(ValueError):
    """Wrong input or usage: one line with the fact, the value and the remedy.

    The command line prints the line and exits 2. A bug of ours raises anything else and exits 1.
    """


def shown(value: object) -> str:
    """A value as a message quotes it: its repr on one line, of bounded length."""
    text = " ".join(line.strip() for line in repr(value).splitlines())  # an array has several
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


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


def warn_caller(line: str) -> None:
    """A UserWarning that points at the line that called this package from outside."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
