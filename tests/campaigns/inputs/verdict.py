"""Checks of the result of an attempt."""

import re
from typing import Any

from tests.campaigns.inputs.attempt import Attempt

BYTES = 1 << 30
"""Limit of memory, including 0.6 GB for the imports."""
SIGNAL = 128
"""Number that a shell adds to the signal that ended a command."""
STOPPED = re.compile("not finite|No space left|cannot write checkpoint")
"""Messages of a training that could not continue, or of a verb that could not write its result."""
COMPILERS = "tmp/torchinductor_"
"""Folder where PyTorch's compiler stores headers, regardless of its cache folder."""
LONGEST = 700
"""Largest number of characters in an error message."""

OF_PYTHON = re.compile(
    r"Traceback|Errno|<class|object at 0x|pydantic|has no attribute|subscriptable|NoneType"
    r"|unsupported operand|positional argument|not iterable|unhashable|not JSON serializable"
    r"|codec can't|invalid literal|recursion|must be (?:str|int|real number)\b|<bound method"
    r"|RuntimeError|TypeError|KeyError|ValueError|OverflowError|c10::|aten::"
)
"""Words that an error message for users must not contain."""


def wrong_with(attempt: Attempt, result: dict[str, Any], *, told: bool = True) -> str:
    """The first problem with a result; empty if there is none.

    Args:
        attempt: the attempt.
        result: its result, from the driver.
        told: True if stderr could be read.
    """
    code, lines = result["code"], result["stderr"].splitlines()
    return (
        _wrong_end(result, lines)
        or _wrong_files(attempt, result)
        or (_wrong_line(lines) if code and told else "")
    )


def _wrong_end(result: dict[str, Any], lines: list[str]) -> str:
    """A problem with the end of the process."""
    code = result["code"]
    if code is None:
        return "hangs"
    if code < 0 or code > SIGNAL:
        return f"signal {-code if code < 0 else code - SIGNAL}"
    if "Traceback" in result["stderr"]:
        return f"traceback: {lines[-1][:200]}"
    if code not in (0, 2):
        return f"exit code {code}"
    return f"{result['bytes'] / 1e9:.1f} GB" if result["bytes"] > BYTES else ""


def _wrong_files(attempt: Attempt, result: dict[str, Any]) -> str:
    """A path that the command must not change, or that was left half-written."""
    code = result["code"]
    changed = result["changed"]
    if "compiled" in attempt.arguments:
        changed = [path for path in changed if not path.startswith(COMPILERS)]
    if code and STOPPED.search(result["stderr"]):
        code = 0  # it started, and its earlier results are kept
    allowed = attempt.writes if code == 0 else ("home/.cache", "run/.lock")
    outside = [path for path in changed if not _under(path, allowed)]
    if outside:
        return f"changed {outside[0]} and {len(outside) - 1} more, exit code {code}"
    left = [path for path in changed if ".tmp" in path or path.startswith("tmp/")]
    return f"left {left[0]}" if left else ""


def _wrong_line(lines: list[str]) -> str:
    """A problem with the error message."""
    ours = [line for line in lines if line.startswith("workhorse")]
    if len(ours) != 1 or lines[-1] != ours[0]:
        return f"{len(ours)} lines of error, {len(lines)} in all"
    line = ours[0]
    if found := OF_PYTHON.search(line):
        return f"speaks of {found[0]!r}: {line[:200]}"
    if len(line) > LONGEST:
        return f"a line of {len(line)} characters"
    if not line.isprintable():
        return f"not printable: {line[:200]!r}"
    return ""


def _under(path: str, allowed: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in allowed) or path == "home"
