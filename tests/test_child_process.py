"""Child processes answer requests, within a limit, and do not outlive their parent."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workhorse.child_process import ChildProcess, NoAnswerError, NotStartedError


def child(tmp_path: Path, body: str, seconds: float = 20) -> ChildProcess:
    """Return a child process whose requests are the arguments of a function with this body."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, re, signal, subprocess, time\n"
        "replies = 3  # the descriptor\n"
        f"def start(*arguments):\n    def answer(request):\n        {body}\n    return answer\n"
    )
    return ChildProcess(path, "a", 1, seconds=seconds)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return not re.search(r"\) [ZX] ", state)


def ends(pid: int) -> bool:
    end = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


def test_an_answer_is_plain_data_of_its_request(tmp_path: Path) -> None:
    made = child(tmp_path, "print('text of the program'); return [request, arguments]")
    for request in (None, 1.5, "é\n\ud83e\r\u2028", {"a": [1]}):
        assert made.ask(request) == [request, ["a", "1"]]
    with pytest.raises(ValueError, match="4300 digits"):
        made.ask(10**5000)
    assert made.ask(1)[0] == 1


def test_an_answer_to_another_request_is_ignored(tmp_path: Path) -> None:
    stale = """os.write(replies, b'[0, "early"]\\n[17, "other"]\\n'); return request"""
    made = child(tmp_path, stale)
    assert [made.ask(number) for number in range(3)] == [0, 1, 2]


def test_a_fork_that_returns_does_not_answer(tmp_path: Path) -> None:
    made = child(tmp_path, "os.fork(); return [request, os.getpid()]")
    first = made.ask(0)
    assert [made.ask(number) for number in range(4)] == [[number, first[1]] for number in range(4)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("time.sleep(60)", "did not answer within 0.5 seconds"),
        ("os.write(replies, b'['); time.sleep(60)", "did not answer within 0.5 seconds"),
        ("[(os.write(replies, b' '), time.sleep(0.1)) for _ in range(600)]", "did not answer"),
        ("while True: os.write(replies, b'[0, 0]\\n')", "did not answer"),
        ("os._exit(0)", "ended"),
        ("raise KeyError", "ended"),
        ("os.write(replies, b'1'); return 1", "sent an invalid answer"),
        ("os.write(replies, b'1\\n'); time.sleep(60)", "sent an invalid answer"),
        ("os.write(replies, b'[' * 60000 + b'\\n'); time.sleep(60)", "sent an invalid answer"),
        ("return 'a' * 10**6", "sent an answer of more than 1,000 bytes"),
    ],
)
def test_a_process_without_an_answer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    if "more than" in reason:
        monkeypatch.setattr("workhorse.child_process.MOST_BYTES", 1000)
    made = child(tmp_path, f"if request: return request\n        {body}", seconds=0.5)
    started = time.monotonic()
    with pytest.raises(NoAnswerError, match=f"^{reason}"):
        made.ask(0)
    assert time.monotonic() - started < 15
    first = made.pid
    assert not is_running(first)
    assert made.ask(1) == 1
    assert made.pid != first


def test_what_arrives_between_requests_is_no_answer(tmp_path: Path) -> None:
    """Nothing is sent then, except by a thread of the program; another process is started."""
    body = "import threading; threading.Timer(0.1, os.write, (replies, b'[2, 0]\\n')).start()"
    made = child(tmp_path, f"{body}; return os.getpid()")
    first = made.ask(0)
    time.sleep(0.5)
    assert made.ask(0) not in (0, first)


GROUP = "return [os.getpid(), subprocess.Popen(['sleep', '60']).pid]"


def end_by_close(made: ChildProcess) -> None:
    made.close()


def end_by_limit(made: ChildProcess) -> None:
    os.kill(made.pid, signal.SIGSTOP)
    with pytest.raises(NoAnswerError):
        made.ask(0)


def end_by_interrupt(made: ChildProcess) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    os.kill(made.pid, signal.SIGSTOP)
    usual = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            made.ask(0)
    finally:
        signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize("end", [end_by_close, end_by_limit, end_by_interrupt])
def test_the_whole_group_ends(tmp_path: Path, end: Callable[[ChildProcess], None]) -> None:
    made = child(tmp_path, GROUP, seconds=2)
    pids = made.ask(0)
    assert all(map(is_running, pids))
    end(made)
    assert all(map(ends, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="see end_with_parent")
@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(60)",
        "re.match('(a+)+$', 'a' * 40 + 'b')",  # never releases the interpreter's lock
    ],
)
def test_a_killed_parent_leaves_no_process(tmp_path: Path, body: str) -> None:
    """Neither the child, during a request or between them, nor its children."""
    made = child(tmp_path, f"if request: {body}\n        {GROUP}")
    script = (
        "import sys, threading; from pathlib import Path\n"
        "from workhorse.child_process import ChildProcess\n"
        "made = ChildProcess(Path(sys.argv[1]), seconds=60)\n"
        "print(*made.ask(0), flush=True); made.ask(1)\n"
    )
    del made
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "program.py"], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pids = [*map(int, parent.stdout.readline().split())]
        time.sleep(0.2)  # the second request has been sent
        assert all(map(is_running, pids))
        parent.kill()
    assert all(map(ends, pids))


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = child(tmp_path, "return request")
    for python in ("/nowhere/python", "/bin/false", "", None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", python)
            with pytest.raises(NotStartedError, match=r"^does not start \(.*: .*\)$"):
                made.ask(1)
    assert made.ask(1) == 1
