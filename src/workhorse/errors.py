"""Errors that a user can correct, what they quote and advise, and warnings at the caller's line."""

import difflib
import sys
import warnings
from collections.abc import Iterable

_SHOWN = 80  # characters of a value in a message
_LISTED = 24  # names
_NEAR = 0.6  # how alike two names are, from 0 to 1, where one may be meant by the other


class WorkhorseError(ValueError):
    """Wrong input or usage: one line with the fact, the value and the remedy.

    The command line prints the line and exits 2. A bug of ours raises anything else and exits 1.
    """


def to_install(extra: str) -> str:
    """The remedy for a missing optional package: how to install the extra that has it."""
    return f"in the clone of workhorse, pip install -e '.[{extra}]'"  # it is on no index


def shown(value: object) -> str:
    """A value as a message quotes it: its repr on one line, of bounded length."""
    text = " ".join(line.strip() for line in repr(value).splitlines())  # an array has several
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def meant(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name that is like a known one; empty if none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"did you mean {close[0]!r}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or which there are."""
    names = sorted(known)
    if remedy := meant(name, names):
        return remedy
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known: {', '.join(names[:_LISTED]) or 'none'}{more}"


def warn_caller(line: str) -> None:
    """A UserWarning that points at the line that called this package from outside."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
