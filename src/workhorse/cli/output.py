"""What every verb says and where: the result on stdout, progress on stderr, an exit code."""

import contextlib
import enum
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

PLAIN_INTERVAL = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class ExitCode(enum.IntEnum):
    """What the process tells the shell."""

    DONE = 0
    FAILURE = 1
    """A bug of ours; the traceback is on stderr."""
    USAGE = 2
    """Wrong usage or input; one line on stderr says which and what to do."""
    HUNG_UP = 129
    """Stopped by SIGHUP, the terminal being gone, after saving."""
    INTERRUPTED = 130
    """Stopped by SIGINT."""
    STOPPED = 143
    """Stopped by SIGTERM, after saving."""


def settle_streams() -> None:
    """Make the three standard streams such that printing neither fails nor goes astray.

    A stream that was closed would lend its number to the next file that is opened, and what a
    library prints would end up in there: its place is taken by nothing. A character that a stream's
    encoding lacks is written as its escape. What cannot be said on stderr, because its reader went
    or its disk is full, ends no training.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    told, encoding = sys.stderr.buffer, sys.stderr.encoding
    _replaced.append(sys.stderr)
    sys.stderr = _Forgiving(told, encoding, "backslashreplace", line_buffering=True)


_replaced: list[TextIO] = []
"""Kept, because a stream that Python forgets closes what it wrote to."""


class _Forgiving(io.TextIOWrapper):
    """A stream whose reader may have gone."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def give_up_stdout() -> None:
    """Print what is left to print; where nobody takes it, see that Python does not try at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """A message as one line of bounded length that a terminal shows and does not obey."""
    line = " ".join(part.strip() for part in text.splitlines())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


LONGEST = 600
"""Characters of an error; its remedy stands at the end, so what is left out is in the middle."""


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_result(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a verb's result on stdout: `result` as one line of JSON, or `text` for a person.

    Paths become strings; a number that JSON has no word for (an infinite loss) becomes null.
    """
    exact = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(_plain(result), ensure_ascii=not exact) if as_json else text)


def for_terminal(text: str) -> str:
    """A model's text as it can be printed: on a terminal its control characters are made visible.

    Printed as they are they would move the cursor, change colours or the window's title. Through a
    pipe every character goes as it is.
    """
    if not sys.stdout.isatty():
        return text
    return text.translate(_VISIBLE)


_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""The pictures that Unicode has of C0 and of DEL; C1 has none."""


def warn(note: str) -> None:
    """Say on stderr what must not go unnoticed."""
    print(f"warning: {one_line(note)}", file=sys.stderr)


@contextmanager
def progress(label: str, unit: str = "") -> Iterator[Callable[[int, int | None], None]]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line every ten seconds.

    Gives `report(done, total)`, both in `unit`; `total` is None while it is not known.
    """
    with _bar(label, unit) if sys.stderr.isatty() else _lines(label, unit) as report:
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
def _lines(label: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
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
    """The same data in what JSON can say."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None  # nan compares false: null too
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
