"""What the environment says of the processes of a run; `torchrun` and `launch` write it."""

import os

from workhorse.errors import WorkhorseError


def count() -> int:
    """How many processes there are."""
    return _number("WORLD_SIZE", 1)


def workers() -> list[str]:
    """The words of a command that starts as many on one machine; none for one."""
    return ["--workers", str(count())] if count() > 1 else []


def rank() -> int:
    """The number of this one, from 0."""
    return _number("RANK", 0)


def rank_here() -> int:
    """The number of this one among those of its machine."""
    return _number("LOCAL_RANK", 0)


def count_here(planned: int = 1) -> int:
    """How many of them share this machine's memory: all that are planned, before they start."""
    return _number("LOCAL_WORLD_SIZE", planned)


def attempt() -> int:
    """How often processes of this machine before these have failed."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(name: str, otherwise: int) -> int:
    """A variable's value.

    Raises:
        WorkhorseError: it is no number.
    """
    value = os.environ.get(name, str(otherwise))
    if not value.isdecimal():
        raise WorkhorseError(
            f"{name}={value!r} in the environment is no number; torchrun sets it, or unset it"
        )
    return int(value)
