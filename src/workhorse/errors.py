"""Errors that a user can correct, helpers for their messages, and warnings at the caller's line."""

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import TypeGuard

LARGEST = 1e15
"""Largest magnitude of a number from a data file or a user's function. The sum of the squares of
larger ones can exceed float32."""
_SHOWN = 80  # characters of a value in a message
_LISTED = 24  # most names that a message lists
_NEAR = 0.6  # least similarity of two names, from 0 to 1, for one to be suggested for the other


class WorkhorseError(ValueError):
    """Wrong input or usage. The message is one line with the fact, the value and the remedy.

    The command line prints the line and exits with code 2. Any other exception is a bug in
    Workhorse and exits with code 1.
    """


def to_install(extra: str) -> str:
    """The remedy for a missing optional package: how to install the extra that contains it."""
    return f"in the clone of workhorse, pip install -e '.[{extra}]'"  # not published on PyPI


def shown(value: object) -> str:
    """Format a value for an error message: its repr on one line, truncated if it is long."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())  # an array's has many
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 document`, `1,234 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def is_usable(value: object) -> TypeGuard[float]:
    """Return True for a number of magnitude up to `LARGEST`, also for True and False."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def meant(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is most similar to an unknown one; empty if none is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"did you mean {close[0]!r}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is most similar to an unknown one, or list the known names."""
    names = sorted(known)
    if remedy := meant(name, names):
        return remedy
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known: {', '.join(names[:_LISTED]) or 'none'}{more}"


def warn_caller(line: str) -> None:
    """Issue a UserWarning that points at the calling line outside this package."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
