"""What is wrong with the answer to an attempt."""

import re
from typing import Any

from tests.campaigns.inputs.attempt import Attempt

BYTES = 1 << 30
"""Of memory, with the 0.6 GB of what is imported."""
SIGNAL = 128
"""A shell adds it to the signal that ended a command."""
STOPPED = re.compile("not finite|No space left|cannot write checkpoint")
"""What a training says that could not go on, or a verb whose result nobody took."""
COMPILERS = "tmp/torchinductor_"
"""Where PyTorch's compiler, if it is asked for, keeps headers, whatever its cache folder is."""
LONGEST = 700
"""Characters of an error's line."""

OF_PYTHON = re.compile(
    r"Traceback|Errno|<class|object at 0x|pydantic|has no attribute|subscriptable|NoneType"
    r"|unsupported operand|positional argument|not iterable|unhashable|not JSON serializable"
    r"|codec can't|invalid literal|recursion|must be (?:str|int|real number)\b|<bound method"
    r"|RuntimeError|TypeError|KeyError|ValueError|OverflowError|c10::|aten::"
)
"""What an error written for people does not hold."""


def wrong_with(attempt: Attempt, result: dict[str, Any], *, told: bool = True) -> str:
    """The first thing that must not be; empty where all is well.

    Args:
        attempt: what was tried.
        result: what came of it, as the driver tells it.
        told: whether what was said on stderr could be read.
    """
    code, lines = result["code"], result["stderr"].splitlines()
    return (
        _wrong_end(result, lines)
        or _wrong_files(attempt, result)
        or (_wrong_line(lines) if code and told else "")
    )


def _wrong_end(result: dict[str, Any], lines: list[str]) -> str:
    """What is wrong with how the process ended."""
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
    """What was changed that the command does not name, or left half-written."""
    code = result["code"]
    changed = result["changed"]
    if "compiled" in attempt.arguments:
        changed = [path for path in changed if not path.startswith(COMPILERS)]
    if code and STOPPED.search(result["stderr"]):
        code = 0  # it began, and what it made before is kept
    allowed = attempt.writes if code == 0 else ("home/.cache", "run/.lock")
    outside = [path for path in changed if not _under(path, allowed)]
    if outside:
        return f"changed {outside[0]} and {len(outside) - 1} more, exit code {code}"
    left = [path for path in changed if ".tmp" in path or path.startswith("tmp/")]
    return f"left {left[0]}" if left else ""


def _wrong_line(lines: list[str]) -> str:
    """What is wrong with how a refusal is told."""
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
