"""The process that renders chat templates: its rights, its limits, its restart and its end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_TEXT
from workhorse.tokenizers.chat.process import TemplateProcess

NOW = "2026-01-02T03:04:05"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def renderer() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.process.close()


def pid_of(renderer: TemplateProcess) -> int:
    return renderer.process.pid


def say(renderer: TemplateProcess, text: str) -> str:
    return renderer.ask("{{ text }}", {"text": text}, NOW)


def test_what_comes_back_is_what_went_in(renderer: TemplateProcess) -> None:
    for text in ("", "é🦊\0", "\ud83e", "\U000f0000" * MAX_TEXT, "x\r\n\u2028y"):
        assert say(renderer, text) == text
    assert renderer.ask("{{ strftime_now('%d %B %Y') }}", {}, NOW) == "02 January 2026"
    assert renderer.ask("a{{ 'b' ~ c }}", None) == '[["a", "b"], ["c"]]'


def test_nothing_is_open_to_it(renderer: TemplateProcess) -> None:
    """A template that escapes from jinja's sandbox still cannot open files or start processes."""
    say(renderer, "x")
    of_it = Path(f"/proc/{pid_of(renderer)}")
    if not of_it.exists():
        pytest.skip("asks /proc")
    limits = {
        line[:25].strip(): line[25:].split()[:2]
        for line in (of_it / "limits").read_text().splitlines()
    }
    for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
        assert limits[name] == ["0", "0"]
    assert limits["Max address space"][0] == str(512 * 2**20)
    assert sorted(path.name for path in (of_it / "fd").iterdir()) == ["0", "1", "2", "3"]
    names = {entry.split("=")[0] for entry in (of_it / "environ").read_text().split("\0")}
    assert names <= {"", "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert "torch" not in (of_it / "maps").read_text()


def test_jinja_needs_no_file_that_is_closed_to_it(renderer: TemplateProcess) -> None:
    """Jinja imports some modules only when a filter needs them."""
    values = ("'a&b\\n\\x41\\u1234'", "text", "1.5", "[1, 2]", "{'a': 1}")
    calls = [f"{{{{ {value} | {name} }}}}" for name in DEFAULT_FILTERS for value in values]
    calls += [f"{{{{ {value} is {name} }}}}" for name in DEFAULT_TESTS for value in values]
    refused: list[str] = []
    for call in calls:
        try:
            renderer.ask(call, {"text": "<b>é &amp; http://a.b</b>"}, NOW)
        except WorkhorseError as error:
            refused.append(str(error))
    assert 0 < len(refused) < len(calls)
    assert not [line for line in refused if re.search("open files|odule|seconds", line)]


@pytest.mark.parametrize("source", [ENDLESS, "{{ 'a' * 10 ** 9 }}"])
def test_one_that_ends_is_replaced(renderer: TemplateProcess, source: str) -> None:
    say(renderer, "x")
    first = pid_of(renderer)
    with pytest.raises(
        WorkhorseError, match="exceeds 1 seconds of CPU time, 512 MB of memory, or 4"
    ):
        renderer.ask(source, {}, NOW)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert say(renderer, "y") == "y"
    assert pid_of(renderer) != first


def test_one_that_was_killed_while_idle_is_replaced(renderer: TemplateProcess) -> None:
    say(renderer, "x")
    os.kill(pid_of(renderer), signal.SIGKILL)
    os.waitid(os.P_PID, pid_of(renderer), os.WEXITED | os.WNOWAIT)
    assert say(renderer, "y") == "y"


def test_a_refusal_of_the_template_ends_nothing(renderer: TemplateProcess) -> None:
    say(renderer, "x")
    first = pid_of(renderer)
    with pytest.raises(WorkhorseError, match="cannot be used: two lines; change"):
        renderer.ask("{{ raise_exception('two\nlines') }}", {}, NOW)
    with pytest.raises(WorkhorseError, match="or 4,000,000 characters of output; change"):
        renderer.ask("{{ 'a' * 4000001 }}", {}, NOW)
    with pytest.raises(WorkhorseError, match="4300 digits"):
        renderer.ask("x", {"number": 10**5000}, NOW)
    assert pid_of(renderer) == first


@pytest.mark.parametrize("size", [1, MAX_TEXT])
def test_one_that_only_waits_is_ended(size: int) -> None:
    renderer = TemplateProcess(wait=0.5)
    say(renderer, "x")
    os.kill(pid_of(renderer), signal.SIGSTOP)
    with pytest.raises(WorkhorseError, match="the chat template cannot be used: "):
        say(renderer, "y" * size)
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of(renderer), 0)


def test_what_an_interrupted_request_would_get_goes_to_nobody(renderer: TemplateProcess) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    say(renderer, "x")
    os.kill(pid_of(renderer), signal.SIGSTOP)
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            say(renderer, "y")
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert say(renderer, "z") == "z"


def test_threads_get_their_own_answers(renderer: TemplateProcess) -> None:
    texts = [f"{number} " * (number % 7) for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: say(renderer, text), texts)) == texts


def test_no_descriptor_is_left_open(renderer: TemplateProcess) -> None:
    say(renderer, "x")
    renderer.process.close()
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(WorkhorseError, match="cannot be used"):
            renderer.ask("{{ 'a' * 10 ** 9 }}", {}, NOW)
    renderer.process.close()
    assert len(os.listdir("/dev/fd")) == len(before)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false", "", None])
def test_a_process_that_does_not_start_is_one_line(
    renderer: TemplateProcess, monkeypatch: pytest.MonkeyPatch, python: str | None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", python)
        with pytest.raises(WorkhorseError, match="renders chat templates does not start") as raised:
            say(renderer, "x")
    assert "\n" not in str(raised.value)
    assert say(renderer, "x") == "x"


SCRIPT = """
import os, signal, sys
from workhorse.tokenizers.chat.process import RENDERER
assert "jinja2" not in sys.modules
RENDERER.ask("x")
print(RENDERER.process.pid, flush=True)
"""
FORK = """
child = os.fork()
print(RENDERER.ask("{{ text }}", {"text": "forked" if child == 0 else "first"}, "2026-01-01"))
print(RENDERER.process.pid, flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
    RENDERER.ask("x")
    print(RENDERER.process.pid)
"""


WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
"""Newer versions of Python warn about a fork in a process with threads, such as NumPy's."""


def run(script: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-c", script], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.split(), done.stderr


def test_it_ends_with_the_one_that_started_it() -> None:
    code, (pid,), errors = run(SCRIPT + "os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, errors) == (-signal.SIGKILL, "")
    state = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError):
        while not re.search(r"\) [ZX] ", state.read_text()):  # the process needs a moment to end
            time.sleep(0.01)


def test_a_fork_has_one_of_its_own() -> None:
    code, lines, errors = run(SCRIPT + FORK)
    assert (code, errors) == (0, "")
    assert {*lines} >= {"first", "forked"}
    pids = [line for line in lines if line.isdigit()]
    assert len(pids) == 4
    assert len({*pids}) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
