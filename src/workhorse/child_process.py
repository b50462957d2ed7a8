"""Child processes that answer requests, for code that can hang, crash or be hostile.

Requests and answers are lines of JSON: `[number, content]`. The child runs this file as a program.
It loads another Python file and calls `start` there, which returns the function that answers. So
the child needs only the standard library and the imports of that file.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""Number of seconds after which a process that does not start is ended."""
MOST_BYTES = 1 << 26
"""Maximum size of an answer."""


class NoAnswerError(Exception):
    """A child process did not answer, and was ended. The message continues "the process …"."""


class NotStartedError(NoAnswerError):
    """A child process does not start."""


class ChildProcess:
    """A process that answers requests, one at a time. The first request starts it.

    It is the leader of a process group. The whole group is ended if an answer is late or invalid,
    by `close`, with this object, and with the program that started it, also if that is killed.

    Args:
        program: the Python file to load; its function `start` gets the arguments as strings.
        arguments: see `program`.
        seconds: time limit of a request, from its first byte to the last byte of the answer.
        flags: options of Python.
        path: further folders that the child can import from.
        options: options of `subprocess.Popen`.
    """

    def __init__(
        self,
        program: Path,
        *arguments: object,
        seconds: float,
        flags: Sequence[str] = ("-P",),
        path: Sequence[str] = (),
        **options: Any,
    ) -> None:
        files = (os.path.abspath(__file__), os.path.abspath(program))
        self._command = [*flags, *files, os.pathsep.join(path), *map(str, arguments)]
        self._seconds, self._options = seconds, options
        self._lock, self._number = threading.Lock(), 0
        self._running: tuple[socket.socket, int] | None = None
        self._end: Callable[[], object] = lambda: None
        self.pid = 0  # of the last process that was started

    def ask(self, request: Any) -> Any:
        """Return the answer to a request, both as plain data. Any thread may call this.

        Raises:
            NoAnswerError: the process did not answer in time, or ended, or does not start. The next
                request starts another.
            ValueError: the request has an integer with thousands of digits.
        """
        with self._lock:
            self._number += 1
            line = _line(self._number, request)
            try:
                return _exchange(self._connection(), self._number, line, self._seconds)
            except BaseException:
                self.close()  # else it would continue to compute this answer
                raise

    def close(self) -> None:
        """End the process group. Any thread may call this, also during a request."""
        self._running = None
        self._end()

    def _connection(self) -> socket.socket:
        if self._running is not None:
            ours, owner = self._running
            try:
                ours.settimeout(0)
                ours.recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # the other end is open and has sent nothing
                if owner == os.getpid():  # a fork starts its own process
                    return ours
            except OSError:
                pass
        self.close()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable or "", *self._command],
                    stdin=subprocess.PIPE,  # see `end_with_parent`
                    stdout=theirs.fileno(),
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it
                    **self._options,
                )
            self.pid, owner = process.pid, os.getpid()
            self._end = weakref.finalize(self, _end, process, ours, owner)
            _exchange(ours, 0, b"", START_SECONDS)
        except (OSError, NoAnswerError) as error:
            ours.close()
            raise NotStartedError(f"does not start ({sys.executable}: {error})") from None
        self._running = ours, owner
        return ours


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill the process group of its leader, if the leader is still running, and wait for it."""
    if process.returncode is None:  # else its id can belong to another process
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[Any], connection: socket.socket, owner: int) -> None:
    if owner == os.getpid():
        end_group(process)
    else:  # this process is a fork, and the child is not its own
        process.poll()
    connection.close()
    if process.stdin is not None:
        process.stdin.close()


def _exchange(connection: socket.socket, number: int, request: bytes, seconds: float) -> Any:
    """Send a request and return the answer with its number; other answers are ignored."""
    end, received = time.monotonic() + seconds, bytearray()
    try:
        connection.settimeout(seconds)
        connection.sendall(request)
        while len(received) <= MOST_BYTES:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left)
            received += (chunk := connection.recv(1 << 16))
            if not chunk:
                raise NoAnswerError("ended")
            if chunk.endswith(b"\n"):
                for of_request, answer in map(json.loads, received.splitlines()):
                    if of_request == number:
                        return answer
                received.clear()
    except TimeoutError:
        raise NoAnswerError(f"did not answer within {seconds:g} seconds") from None
    except OSError:
        raise NoAnswerError("ended") from None
    except (ValueError, TypeError, RecursionError):
        raise NoAnswerError("sent an invalid answer") from None
    raise NoAnswerError(f"sent an answer of more than {MOST_BYTES:,} bytes")


def _line(number: int, content: Any) -> bytes:
    line = json.dumps([number, content], ensure_ascii=False)
    return f"{line}\n".encode("utf-8", "surrogatepass")


def _answer_requests(program: str, path: str, *arguments: str) -> None:
    """Answer requests until the other end is closed: the main function of the child."""
    end_with_parent(0, os.getpgrp())
    connection = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # the output of the program goes to stderr
    sys.path += filter(None, path.split(os.pathsep))
    answer, own = runpy.run_path(program)["start"](*arguments), os.getpid()
    connection.sendall(_line(0, None))
    for line in connection.makefile("rb"):
        number, request = json.loads(line)
        reply = _line(number, answer(request))
        if os.getpid() != own:  # the program has forked, and both processes return
            os._exit(0)
        connection.sendall(reply)


def end_with_parent(stream: int, group: int) -> None:
    """Let the kernel kill a process group when its parent ends (only on Linux).

    The parent holds the other end of `stream`, a pipe or socket, and writes nothing. A thread could
    not do this, because a function can hold the interpreter's lock.
    """
    import fcntl  # not on Windows

    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(stream, fcntl.F_SETOWN, -group)
        fcntl.fcntl(stream, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(stream, fcntl.F_SETFL, os.O_ASYNC)


if __name__ == "__main__":
    _answer_requests(*sys.argv[1:])
