"""Libraries are compiled into the user's cache once, completely, and without blocking anything."""

import errno
import fcntl
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workhorse.devices.instructions import levels_here
from workhorse.files.writing import one_process_at_a_time
from workhorse.native import build
from workhorse.native.operators import LOADERS, resolve

WORKS = """#!/bin/sh
echo run >> "$0.runs"
while [ "$1" != -o ]; do shift; done
printf half > "$2"; sleep 0.1; printf ' and half' >> "$2"
"""
FAILS = """#!/bin/sh
echo run >> "$0.runs"
echo "no such instruction" >&2
exit 1
"""

INTERRUPTED = """#!/bin/sh
kill -INT $$
"""
OUT_OF_MEMORY = """#!/bin/sh
echo "g++: fatal error: Killed signal terminated program cc1plus" >&2
exit 1
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    return tmp_path / "cache"


def why_not(*, wait: bool) -> str | None:
    return resolve("decoding", wait=wait).why_not.get("decoding")


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Replace the compiler by a script; return the file that gets a line for each of its runs."""
    path = tmp_path / "g++"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(build, "_crash", lambda name, library: None)
    return tmp_path / "g++.runs"


def test_this_compiler_accepts_every_source() -> None:
    """Tests of a library that did not compile are skipped; this one fails."""
    reasons = resolve(*LOADERS, wait=True).why_not
    assert not [reason for reason in reasons.values() if "did not compile" in reason]


def test_what_is_not_available_keeps_nothing_of_its_caller_alive(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback of a stored exception would keep the caller's objects, and so a whole model."""
    monkeypatch.setenv(build.SWITCH, "0")

    def caller() -> weakref.ref[torch.Tensor]:
        held = torch.empty(1)
        assert why_not(wait=True) == f"{build.SWITCH}=0"
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_compiled_once(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Waiting for it is announced once, not for each library or process that waits."""
    runs = compiler(tmp_path, monkeypatch, WORKS)
    monkeypatch.setattr(build, "_ANNOUNCED", threading.Lock())
    library = build.ensure("decoding", wait=True)
    build.ensure("vectors", wait=True).unlink()
    assert capsys.readouterr().err.count("compiling native operators for this CPU, once") == 1
    assert library == build.ensure("decoding", wait=True) == build.ensure("decoding", wait=False)
    assert library.is_relative_to(cache)
    assert runs.read_text() == "run\n" * 2


@pytest.mark.parametrize("script", [INTERRUPTED, OUT_OF_MEMORY])
def test_a_compiler_that_was_interrupted_is_asked_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """Ctrl-C at a terminal also reaches the compiler."""
    compiler(tmp_path, monkeypatch, script)
    assert "was ended by a signal" in (why_not(wait=True) or "")
    compiler(tmp_path, monkeypatch, WORKS)
    assert build.ensure("decoding", wait=True).is_relative_to(cache)


def test_of_two_at_once_one_compiles(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, WORKS)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.ensure("decoding", wait=True), range(2))
    assert first == second
    assert first.read_text() == "half and half"
    assert runs.read_text() == "run\n"
    assert set(first.parent.iterdir()) == {first, first.parent / "decoding.lock"}


@pytest.fixture
def removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a library that was compiled and then removed."""
    compiler(tmp_path, monkeypatch, WORKS)
    library = build.ensure("decoding", wait=True)
    library.unlink()
    return library


def test_an_interrupt_waits_for_no_other_process(removed: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from workhorse.native.operators import resolve\n"
        "print(flush=True); resolve('decoding', wait=True)"
    )
    with (
        one_process_at_a_time(removed.with_name("decoding.lock")),
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as other,
    ):
        assert other.stdout.readline()
        time.sleep(0.5)
        assert other.poll() is None
        other.send_signal(signal.SIGINT)
        assert other.wait(timeout=60) == -signal.SIGINT
    assert not list(removed.parent.glob("*.so"))


def test_one_that_waited_too_long_compiles_too(
    removed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_SECONDS", 0.3)
    with one_process_at_a_time(removed.with_name("decoding.lock")):
        assert build.ensure("decoding", wait=True) == removed


def test_where_nothing_can_be_locked_it_is_compiled(
    removed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.ensure("decoding", wait=True) == removed


def refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_failure_is_remembered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, FAILS)
    for expected in ("did not compile; see", "did not compile before; see"):
        reason = why_not(wait=True)
        assert reason is not None
        assert reason.startswith(expected)
    assert runs.read_text() == "run\n"
    assert "no such instruction" in next(cache.rglob("*-failure.txt")).read_text()


@pytest.mark.parametrize("helps", [True, False])
def test_a_library_whose_errors_crash_is_linked_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    """It is linked with PyTorch's C++ runtime; if that does not help, it is not available."""
    runs = compiler(tmp_path, monkeypatch, WORKS)
    crashes = iter(["signal 11", None if helps else "signal 11"])
    monkeypatch.setattr(build, "_crash", lambda name, library: next(crashes))
    if helps:
        assert build.ensure("decoding", wait=True).read_text() == "half and half"
    else:
        assert (why_not(wait=True) or "").startswith("did not compile; see")
        assert next(cache.rglob("*-failure.txt")).read_text() == "signal 11"
    assert runs.read_text() == "run\nrun\n"


@pytest.mark.parametrize(("ends", "reason"), [("os.abort()", "signal 6"), ("sys.exit(1)", None)])
def test_a_crash_is_seen_from_another_process(
    monkeypatch: pytest.MonkeyPatch, ends: str, reason: str | None
) -> None:
    monkeypatch.setattr(build, "_TRY", f"import os, sys; {ends}")
    found = build._crash("decoding", Path("decoding.so"))
    assert found is None if reason is None else reason in (found or "")


def test_another_compiler_tries_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, FAILS)
    assert why_not(wait=True)
    (tmp_path / "other").mkdir()
    compiler(tmp_path / "other", monkeypatch, WORKS)
    assert build.ensure("decoding", wait=True).exists()


def test_start_does_not_wait(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = compiler(tmp_path, monkeypatch, WORKS)
    started: list[list[str]] = []
    build._build_in_background.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
        assert why_not(wait=False) == "being compiled for the next start"
        assert why_not(wait=False) == "being compiled for the next start"
    build._build_in_background.cache_clear()
    assert len(started) == 1
    assert not runs.exists()
    *python, code = started[0]
    untried = "from workhorse.native import build; build._crash = lambda *_: None; "
    subprocess.run([*python, untried + code], check=True)
    assert runs.read_text() == "run\n"


def test_broken_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WORKS)
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    reason = why_not(wait=True)
    assert reason is not None
    assert reason.startswith("cannot load")


def test_a_second_library_of_the_same_operators_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading both would make PyTorch end the process."""
    compiler(tmp_path, monkeypatch, WORKS)
    monkeypatch.setattr(torch.ops, "loaded_libraries", {"/elsewhere/decoding-0123456789abcdef.so"})
    reason = why_not(wait=True)
    assert reason is not None
    assert "this process has loaded /elsewhere/decoding" in reason


@pytest.mark.parametrize("damage", [lambda whole: whole[:5], lambda whole: b"H" + whole[1:]])
def test_a_library_that_was_cut_or_changed_is_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    runs = compiler(tmp_path, monkeypatch, WORKS)
    library = build.ensure("decoding", wait=True)
    library.write_bytes(damage(library.read_bytes()))
    assert build.ensure("decoding", wait=True).read_text() == "half and half"
    assert runs.read_text() == "run\nrun\n"
    assert set(library.parent.iterdir()) == {library, library.parent / "decoding.lock"}


def test_a_library_that_others_may_write_is_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, WORKS)
    library = build.ensure("decoding", wait=True)
    library.chmod(0o720)
    assert build.ensure("decoding", wait=True) == library
    assert runs.read_text() == "run\nrun\n"
    assert library.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_compiler_left_is_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, WORKS)
    library = build.ensure("decoding", wait=True)
    library.unlink()
    old, recent = library.parent / "building-old", library.parent / "building-now"
    for folder in (old, recent):
        folder.mkdir()
        (folder / "decoding.so").write_text("half")
    os.utime(old, (0, 0))
    assert build.ensure("decoding", wait=True) == library
    assert set(library.parent.iterdir()) == {library, library.parent / "decoding.lock", recent}


def test_each_level_has_a_library_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not levels_here():
        pytest.skip("this CPU has no level")
    runs = compiler(tmp_path, monkeypatch, WORKS)
    libraries = {build.ensure("decoding", wait=True)}
    for level in levels_here():
        monkeypatch.setenv(build.SWITCH, level)
        libraries.add(build.ensure("decoding", wait=True))
    assert len(libraries) == len(runs.read_text().split()) == 1 + len(levels_here())


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not(wait=True) == "no C++ compiler: no-such-compiler is not in PATH"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert why_not(wait=False) == "no C++ compiler: g++ or clang++ is not in PATH"


def test_no_place_to_write(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WORKS)
    cache.write_text("a file")
    monkeypatch.setattr(subprocess, "Popen", None)  # no background process is started either
    for wait in (True, False):
        reason = why_not(wait=wait)
        assert reason is not None
        assert reason.startswith(f"cannot compile into {cache}")


def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WORKS)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    reason = why_not(wait=True)
    assert reason is not None
    assert reason.startswith("this account has no home directory")
    assert reason.endswith("set XDG_CACHE_HOME")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert why_not(wait=True) == "WORKHORSE_NATIVE=0"


@pytest.mark.parametrize(
    "source", ["bindings/decoding.cpp", "ops/decoding/linear.h", "simd/bf16.h"]
)
def test_a_change_of_any_source_needs_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    runs = compiler(tmp_path, monkeypatch, WORKS)
    sources = tmp_path / "native"
    shutil.copytree(build._sources(), sources)
    monkeypatch.setattr(build, "_sources", lambda: sources)
    monkeypatch.setattr(build, "sources_digest", build.sources_digest.__wrapped__)
    before = build.ensure("decoding", wait=True)
    assert build.ensure("decoding", wait=True) == before
    changed = sources / source
    changed.write_text(changed.read_text() + "// another\n")
    assert build.ensure("decoding", wait=True).parent != before.parent
    assert runs.read_text() == "run\nrun\n"


def test_the_sources_of_every_library_are_there() -> None:
    """An installed package contains them too: it includes all files of the folder."""
    for name in LOADERS:
        assert (build._sources() / "bindings" / f"{name}.cpp").is_file()
    included = re.compile(r'^#include "(.+)"$', re.MULTILINE)
    for source in build._sources().rglob("*.*"):
        if source.suffix in (".h", ".cpp"):
            for name in included.findall(source.read_text()):
                assert (build._sources() / name).is_file(), f"{source}: {name}"


SLOW = """#!/bin/sh
sleep 60 &
echo $! > "$0.part"
wait
"""


def pid_of(part: Path) -> int:
    """Return the id of the part of a compiler that does the work, as `cc1plus` does."""
    end = time.monotonic() + 20
    while not (part.exists() and part.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(part.read_text())


def assert_ends(pid: int) -> None:
    state, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while state.exists() and not re.search(r"\) [ZX] ", state.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_compiler_that_takes_too_long_is_tried_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, SLOW)
    monkeypatch.setattr(build, "_SECONDS", 1)
    assert "the next start tries again" in (why_not(wait=True) or "")
    assert not list(cache.rglob("*-failure.txt"))
    assert_ends(pid_of(runs.with_suffix(".part")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_parts_of_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A line says what is waited for."""
    runs = compiler(tmp_path, monkeypatch, SLOW)
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from workhorse.native.operators import resolve\n"
        "resolve('decoding', wait=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as other:
        assert other.stderr.readline().startswith("compiling native operators for this CPU, once")
        pid = pid_of(runs.with_suffix(".part"))
        other.send_signal(number)
        other.communicate(timeout=60)
    assert_ends(pid)
