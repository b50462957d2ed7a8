"""Checks of the arguments of functions that users call."""

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

from workhorse.errors import WorkhorseError, shown


def integer(name: str, value: object, least: int) -> int:
    """Check the integer option `name`, and return its value as a Python int.

    Raises:
        WorkhorseError: the value is not an integer, or is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise WorkhorseError(
            f"{name}={shown(value)} is out of range; give an integer of {least} or more"
        )
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise an error if the value of the option `name` is not one of its choices."""
    if not isinstance(value, str) or value not in choices:
        raise WorkhorseError(f"{name}={shown(value)} is unknown; choose {', '.join(choices)}")


def token_ids(tokens: Any, rule: str, remedy: str) -> list[int]:
    """Convert token ids to a list of Python ints.

    Args:
        tokens: a list of integers, or a tensor or array of one dimension.
        rule: the beginning of the error message, which states the expected type.
        remedy: the end of the error message.

    Raises:
        WorkhorseError: `tokens` is not a sequence of integers.
    """
    try:
        if isinstance(tokens, str | bytes | bytearray | set | frozenset | dict):
            raise TypeError
        ids = list(tokens)
        if any(isinstance(token, bool) or getattr(token, "ndim", 0) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device
        raise WorkhorseError(f"{rule}, not {shown(cast(object, tokens))}; {remedy}") from None
