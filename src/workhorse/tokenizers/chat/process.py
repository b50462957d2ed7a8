"""Runs the process that renders chat templates: started by the first rendering, ended at exit.

Chat templates come with downloaded models and are not trusted. Jinja's sandbox denies them access
to the machine, but they could still exhaust its memory or CPU, for example with nested loops. So
they run in a small process with limits (`sandbox.py`). If a template exceeds a limit, the process
dies, and the next rendering starts another.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from workhorse.child_process import ChildProcess, NoAnswerError, NotStartedError
from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_MEMORY, MAX_SECONDS, MAX_TEXT, MAX_WAIT

_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Environment variables that the process inherits. Some builds of Python need them to start."""


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
        self._limits = (
            f"{seconds:g} seconds of CPU time, {memory / 2**20:.0f} MB of memory, or "
            f"{MAX_TEXT:,} characters of output"
        )
        self.process = ChildProcess(
            Path(__file__).with_name("sandbox.py"),
            seconds,
            memory,
            seconds=wait,
            flags=("-I", "-S"),
            path=_folders(),
            stderr=DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )

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
            answer = self.process.ask(request)
        except ValueError as error:  # an integer with thousands of digits
            raise refusal(str(error)) from None
        except NotStartedError as error:
            raise WorkhorseError(
                f"the process that renders chat templates {error}; allow this program to start "
                "processes"
            ) from None
        except NoAnswerError:
            answer = ""
        # The process is not trusted.
        status, text = (answer[:1], answer[1:]) if isinstance(answer, str) else ("", "")
        if status == "-":
            raise refusal(" ".join(text.split())[:500])
        if status != "+" or len(text) > MAX_TEXT:
            raise refusal(f"it exceeds {self._limits}")
        return text


def refusal(line: str) -> WorkhorseError:
    """Return the error for a template that cannot be used, with a remedy."""
    return WorkhorseError(
        f"the chat template cannot be used: {line}; change the template or the messages"
    )


def _folders() -> list[str]:
    """Return the folders of the packages that `sandbox.py` imports."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name))]
    return [str(Path(origin).absolute().parents[1]) for origin in origins if origin]


RENDERER = TemplateProcess()
"""The process that all templates share."""
