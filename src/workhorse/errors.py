"""The errors a user can mend, and warnings at the line that they wrote."""

import sys
import warnings


class WorkhorseError(ValueError):
    """Wrong input or usage: one line with the fact, the value and the remedy.

    The command line prints the line and exits 2. A bug of ours raises anything else and exits 1.
    """


def warn_caller(line: str) -> None:
    """A UserWarning that points at the line that called this package from outside."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)
