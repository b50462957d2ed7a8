"""Runs the process that renders chat templates: started by the first rendering, ended at exit.

Chat templates come with downloaded models and are not trusted. Jinja's sandbox denies them access
to the machine, but they could still exhaust its memory or CPU, for example with nested loops. So
they run in a small process with limits (`sandbox.py`). If a template exceeds a limit, the process
dies, and the next rendering starts another.
"""

import atexit
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_MEMORY, MAX_SECONDS, MAX_TEXT, MAX_WAIT

_BOOT = """import sys
sys.path += sys.argv[3:]
import sandbox
sandbox.serve(float(sys.argv[1]), int(sys.argv[2]))"""
_MAX_ANSWER = 1 + 4 * MAX_TEXT
"""Maximum size of an answer in bytes: a status, and up to four bytes per character."""
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Environment variables that the process inherits. Some builds of Python need them to start."""
READY = b"ready"


class TemplateProcess:
    """Renders templates, one at a time. Any thread may call it.

    Args:
        seconds: CPU time limit of each rendering.
        memory: limit of the address space of the process, in bytes.
        wait: number of seconds after which a process that does not answer is killed.
    """

    def __init__(
        self, seconds: float = MAX_SECONDS, memory: int = MAX_MEMORY, wait: float = MAX_WAIT
    ) -> None:
        self._seconds = seconds
        self._wait = struct.pack("ll", int(wait), int(wait % 1 * 1e6))  # a C timeval
        self._memory = memory
        self._lock = threading.Lock()
        self._running: tuple[Popen[bytes], Connection] | None = None

    def ask(
        self,
        source: str,
        variables: dict[str, Any] | None = None,
        now: str = "",
        equals: Mapping[str, str] | None = None,
    ) -> str:
        """Render a template to up to `MAX_TEXT` characters.

        Args:
            source: source of the template.
            variables: the template's variables, as plain data. If None, the template is not
                rendered: the literal strings and the variables in it are returned, as JSON.
            now: current time for the template, in ISO format.
            equals: strings that the template finds equal to another string; see `sandbox.Equal`.

        Raises:
            WorkhorseError: the template is invalid, raises an error or exceeds a limit; or the
                process cannot be started.
        """
        request = {"source": source, "variables": variables, "now": now, "equals": equals or {}}
        try:
            data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except ValueError as error:  # an integer with thousands of digits
            raise refusal(str(error)) from None
        with self._lock:
            answer = self._answer(data)
        status, text = answer[:1], answer[1:]
        if status == "-":
            raise refusal(" ".join(text.split())[:500])
        if status != "+" or len(text) > MAX_TEXT:
            raise refusal(
                f"it exceeds {self._seconds:g} seconds of CPU time, "
                f"{self._memory / 2**20:.0f} MB of memory, or {MAX_TEXT:,} characters of output"
            )
        return text

    def stop(self) -> None:
        """Kill the process; the next request starts another."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()

    def _answer(self, request: bytes) -> str:
        """Send a request and return the answer: a status and text.

        The answer is empty if the process died, timed out or sent invalid data.
        """
        try:
            _, connection = self._running_process()
            connection.send_bytes(request)
            return connection.recv_bytes(_MAX_ANSWER).decode("utf-8", "surrogatepass")
        except (OSError, EOFError, UnicodeDecodeError):
            self.stop()
            return ""
        except BaseException:
            self.stop()  # else the next request would read this answer
            raise

    def _running_process(self) -> tuple[Popen[bytes], Connection]:
        # In a fork of the process that started it, `poll` returns 0.
        if self._running is not None and self._running[0].poll() is None:
            return self._running
        self.stop()
        limits = (str(self._seconds), str(self._memory))
        command = [sys.executable or "", "-I", "-S", "-c", _BOOT, *limits, *_folders()]
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, self._wait)
        connection = Connection(ours.detach())
        try:
            with theirs:
                process = Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it
                )
            self._running = process, connection
            if not connection.poll(MAX_WAIT) or connection.recv_bytes() != READY:
                raise EOFError
        except (OSError, EOFError) as error:
            connection.close()
            raise WorkhorseError(
                f"the process that renders chat templates does not start ({sys.executable}: "
                f"{error or 'it exits'}); allow this program to start processes"
            ) from None
        return process, connection


def refusal(line: str) -> WorkhorseError:
    """Return the error for a template that cannot be used, with a remedy."""
    return WorkhorseError(
        f"the chat template cannot be used: {line}; change the template or the messages"
    )


def _folders() -> list[str]:
    """Return the folders of `sandbox.py` and of the packages that it imports."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name))]
    packages = [Path(origin).absolute().parents[1] for origin in origins if origin]
    return [str(Path(__file__).parent), *map(str, packages)]


RENDERER = TemplateProcess()
"""The process that all templates share."""
atexit.register(RENDERER.stop)
