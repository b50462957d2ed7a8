"""Errors that a user can correct, values quoted in them, and warnings at the caller's line."""

import sys
import warnings

_SHOWN = 80  # characters of a value in a message


class WorkhorseError(ValueError):
    """Wrong input or usage: one line with the fact, the value and the remedy.

    The command line prints the line and exits 2. A bug of ours raises anything else and exits 1.
    """


def shown(value: object) -> str:
    """A value as a message quotes it: its repr on one line, of bounded length."""
    text = " ".join(line.strip() for line in repr(value).splitlines())  # an array has several
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def warn_caller(line: str) -> None:
    """A UserWarning that points at the line that called this package from outside."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
