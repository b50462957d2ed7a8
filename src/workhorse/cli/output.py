"""Output shared by all verbs (results on stdout, progress on stderr), and the exit codes."""

import contextlib
import enum
import io
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

PLAIN_INTERVAL = 10.0
"""Seconds between two progress lines when stderr is not a terminal."""


class ExitCode(enum.IntEnum):
    """The exit codes of the command."""

    DONE = 0
    FAILURE = 1
    """A bug in Workhorse; the traceback is on stderr."""
    USAGE = 2
    """Wrong usage or input; one line on stderr explains the problem and the remedy."""
    HUNG_UP = 129
    """Stopped by SIGHUP (the terminal was closed), after saving."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C)."""
    STOPPED = 143
    """Stopped by SIGTERM, after saving."""

    @classmethod
    def after(cls, signal_name: str) -> "ExitCode":
        """The exit code of a run that was stopped by the signal with this name, such as SIGTERM."""
        return cls(128 + signal.Signals[signal_name])


def settle_streams() -> None:
    """Set up stdin, stdout and stderr so that printing does not fail or write into another file.

    A closed stream is replaced by /dev/null. Otherwise the next opened file would get the stream's
    descriptor, and a library's output would be written into that file. Characters that a stream's
    encoding does not have are escaped. Failures to write to stderr (its reader has exited, its disk
    is full) are ignored, so that they do not stop a training run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    told, encoding = sys.stderr.buffer, sys.stderr.encoding
    _replaced.append(sys.stderr)
    sys.stderr = _Forgiving(told, encoding, "backslashreplace", line_buffering=True)


_replaced: list[TextIO] = []
"""Streams that were replaced. They are kept here because garbage collection would close their
files."""


class _Forgiving(io.TextIOWrapper):
    """A text stream that ignores errors when writing."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def give_up_stdout() -> None:
    """Flush stdout. If that fails, redirect it to /dev/null, because Python flushes again at exit.

    Flushing fails if the reader of a pipe has exited.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """Convert a message to one line of at most about `LONGEST` characters.

    Control characters are escaped.
    """
    line = " ".join(part.strip() for part in text.splitlines())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


LONGEST = 600
"""Maximum number of characters of a message. Longer messages lose their middle, because their end
has the remedy."""


def next_command(*words: str) -> str:
    """The line that suggests a next command, with the command as the reader can type it here.

    It names the file of `workhorse` if that is not on PATH, as in an environment that is not
    activated.
    """
    program = Path("workhorse")
    beside = Path(sys.executable).with_name(program.name)
    if not shutil.which(program) and beside.exists():
        here = Path.cwd()
        program = beside.relative_to(here) if beside.is_relative_to(here) else beside
    return f"next: {shlex.join([str(program), *words])}"


def aligned(rows: Sequence[Sequence[str]], justify: Callable[..., str] = str.rjust) -> list[str]:
    """Format rows as lines of a table: the first column flush left, the others by `justify`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *map(justify, cells, widths[1:])]).rstrip())
    return lines


def print_result(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a verb's result on stdout: `result` as one line of JSON, or `text` for humans.

    In JSON, paths become strings. Infinite numbers and NaN, which JSON cannot express, become null.
    """
    exact = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(_plain(result), ensure_ascii=not exact) if as_json else text)


def for_terminal(text: str) -> str:
    """Prepare a model's output for stdout: if that is a terminal, make control characters visible.

    Otherwise they could move the cursor, change colours or set the window's title. Output to a pipe
    or file is not changed.
    """
    if not sys.stdout.isatty():
        return text
    return text.translate(_VISIBLE)


_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Replacements of control characters. C0 characters and DEL become Unicode's control pictures. C1
characters have no pictures and become U+FFFD."""


def warn(note: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {one_line(note)}", file=sys.stderr)


@contextmanager
def status() -> Iterator[Callable[[str], object]]:
    """Yield a function `show(doing)` that shows the current activity, if stderr is a terminal.

    Use it for work that takes seconds and whose total is not known; otherwise use `progress`.
    """
    if not sys.stderr.isatty():
        yield lambda doing: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as shown:
        yield lambda doing: shown.update(Text(one_line(doing)))


@contextmanager
def progress(label: str, unit: str = "") -> Iterator[Callable[[int, int | None], None]]:
    """Show progress on stderr: a bar on a terminal, otherwise a line every ten seconds.

    Yields a function `report(done, total)`. Both arguments are counts of `unit`; `total` is None
    while it is not known.
    """
    with _bar(label, unit) if sys.stderr.isatty() else progress_lines(label, unit) as report:
        yield report


@contextmanager
def _bar(label: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed:,}} {unit}".rstrip()),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def progress_lines(label: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """Print a line of progress on stderr every ten seconds; see `progress`."""
    started = last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_INTERVAL:
            return
        last = now
        share = f" of {total:,} ({done / total:.0%})" if total else ""
        line = f"{label}: {done:,}{share} {unit}".rstrip()
        print(f"{line}, {now - started:.0f} s", file=sys.stderr, flush=True)

    yield report


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON can express, including all nested values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None  # nan compares false: null too
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
