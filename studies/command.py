"""What the commands of the studies have in common."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from workhorse.errors import WorkhorseError


def parser(about: str | None) -> argparse.ArgumentParser:
    """For a program's arguments, each shown with its default.

    Args:
        about: the docstring of the program, whose first line is its help.
    """
    return argparse.ArgumentParser(
        description=(about or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with one line, and exit code 2, where an input cannot be."""
    try:
        yield
    except WorkhorseError as error:
        print(f"workhorse: {error}", file=sys.stderr)
        raise SystemExit(2) from None
