"""Compile the operators of this package once per machine.

A library is stored as `native/KEY/NAME-DIGEST.so` in the user's cache folder. KEY is a digest of
the sources, the compiler, PyTorch, the CPU and the instructions used, so that different machines
can share a home directory. DIGEST is the digest of the library's contents. A library with other
contents is incomplete and would crash the process, so it is compiled again.
"""

import atexit
import functools
import hashlib
import importlib.resources
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch.utils import cpp_extension

from workhorse.child_process import end_group, end_with_parent
from workhorse.devices.instructions import SWITCH, compiler_flags, cpuinfo_field, switched_off
from workhorse.devices.names import cache_folder
from workhorse.errors import WorkhorseError
from workhorse.files.writing import one_process_at_a_time

_FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=off", "-std=c++20", "-fPIC", "-shared")
_REFUSED = {
    "decoding": "torch.ops.workhorse.argmax(z)",
    "matrix_unit": "torch.ops.workhorse.gemm(z, z, None)",
    "steps": "torch.ops.workhorse.decode_step(z, z, z, 0, [], z, z, [], [], [], z, 0, 0, 0)",
    "training": "torch.ops.workhorse.activation(z, None, z, '')",
    "vectors": "torch.ops.workhorse.product(z, z, None)",
}
"""For each library, a call with wrong arguments, to test that its errors reach Python."""
_TRY = """
import sys, torch
z = torch.zeros(())
try:
    torch.ops.load_library(sys.argv[1])
    exec(sys.argv[2])
except (OSError, RuntimeError, AttributeError):
    pass
"""
_SHARED_LIBSTDCXX = ("-shared-libgcc", "-l:libstdc++.so.6")
"""Linker options for the C++ runtime that PyTorch uses, instead of the compiler's own."""
_SECONDS = 300
_SCRATCH = "building-"
_LOADING = threading.Lock()
_TRACED: set[str] = set()
"""The operators whose result shapes are registered."""
_ANNOUNCED = threading.Lock()
"""Locked after this process has printed that it compiles."""


class Unavailable(Exception):
    """Native operators are not available; the message is the reason in one line."""


def ensure(name: str, *, wait: bool) -> Path:
    """Return the path of a compiled library. It is compiled first if it does not exist.

    Args:
        name: name of the library; its source is `bindings/NAME.cpp` of this package.
        wait: True to compile now, or to wait for another process that compiles it. False to compile
            in a separate process, so that the next start finds the library.

    Raises:
        Unavailable: operators are switched off, there is no compiler, the cache is not writable,
            the library does not compile, or it is not compiled yet and `wait` is False. A compiler
            failure is stored, and the library is not compiled again, unless a signal ended the
            compiler.
        WorkhorseError: this CPU does not have the requested instructions.
    """
    if switched_off():
        raise Unavailable(f"{SWITCH}=0")
    compiler = _compiler()
    folder = _folder(compiler)
    if library := _compiled(folder, name):
        return library
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        if not wait:
            _scratch(folder).cleanup()  # check that the folder is writable
            _build_in_background(name)
            raise Unavailable("being compiled for the next start")
        if _ANNOUNCED.acquire(blocking=False):
            line = "compiling native operators for this CPU, once; this can take a minute or two"
            print(line, file=sys.stderr, flush=True)
        with ExitStack() as stack:
            with suppress(OSError):  # without locks, two processes may compile the same
                lock = folder / f"{name}.lock"
                lock.touch(mode=0o600)
                stack.enter_context(one_process_at_a_time(lock, patience=_SECONDS))
            return _compiled(folder, name) or _compile(compiler, folder, name)
    except OSError as error:
        raise Unavailable(f"cannot compile into {folder}: {error.strerror}") from None


def _compile(compiler: str, folder: Path, name: str) -> Path:
    """Compile a library now and return its path; the message of a failure is stored in `folder`."""
    with _scratch(folder) as scratch:
        made, report = Path(scratch) / f"{name}.so", Path(scratch) / "failure.txt"
        command = [compiler, *_flags(), *_paths(name), "-o", str(made)]
        problem = _run(command)
        if problem is None and (problem := _crash(name, made)):
            again = _run([*command, *_SHARED_LIBSTDCXX])
            problem = problem if again else _crash(name, made)
        if problem is None:
            made.chmod(0o700)
            return made.replace(folder / f"{name}-{_digest(made)}.so")
        report.write_text(problem, encoding="utf-8")
        failure = report.replace(_failure(folder, name))
    raise Unavailable(f"did not compile; see {failure}")


def _crash(name: str, library: Path) -> str | None:
    """Check in another process that errors raised by a library reach Python.

    An error ends the process if the compiler linked another C++ runtime into the library. A library
    that cannot be loaded passes this check, because `load` reports it.

    Returns:
        The reason why the library cannot be used, or None.
    """
    command = [sys.executable, "-c", _TRY, str(library), _REFUSED.get(name, "")]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"testing the library took more than {_SECONDS} seconds; the next start tries again"
        ) from None
    if done.returncode >= 0:
        return None
    return (
        f"an error in the library ends the process with signal {-done.returncode}, as if it had "
        "its own C++ runtime; set CXX to another compiler"
    )


def _scratch(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder)


Reduced = tuple[Callable[[], object], tuple[()]]


def loading(load: Callable[..., object]) -> Reduced:
    """Result of `__reduce__` for operators: a process that unpickles them loads their library."""
    return partial(load, wait=True), ()


def provide(name: str, shapes: Mapping[str, Callable[..., object]], *, wait: bool) -> None:
    """Load a library. It is compiled first if it is not in the user's cache.

    Args:
        name: see `ensure`.
        shapes: for each operator, a function that computes the shapes of its results, for tracing.
            Operators that do not exist on this CPU are skipped.
        wait: see `ensure`.

    Raises:
        Unavailable: see `ensure` and `load`.
    """
    load(ensure(name, wait=wait))
    with _LOADING:
        for operator, function in shapes.items():
            if operator not in _TRACED and hasattr(torch.ops.workhorse, operator):
                torch.library.register_fake(f"workhorse::{operator}", function)
                _TRACED.add(operator)


def load(library: Path) -> None:
    """Load a compiled library, which registers its operators with PyTorch.

    Raises:
        Unavailable: it cannot be loaded, or another library with the same operators is loaded.
    """
    operators = library.name.partition("-")[0]
    with _LOADING:  # `load_library` changes the process's dlopen flags
        for other in map(Path, torch.ops.loaded_libraries):
            if other.name.partition("-")[0] == operators:
                if other.name == library.name:
                    return
                raise Unavailable(f"cannot load {library}: this process has loaded {other}")
        try:
            torch.ops.load_library(library)
        except OSError as error:
            raise Unavailable(f"cannot load {library}: {error}".splitlines()[0]) from None


def _compiled(folder: Path, name: str) -> Path | None:
    """Path of a library that was compiled before, else None."""
    if library := _whole(folder, name):
        return library
    failure = _failure(folder, name)
    if failure.exists():
        raise Unavailable(f"did not compile before; see {failure}, remove it to try again")
    return None


def _failure(folder: Path, name: str) -> Path:
    """Path of the file that stores the reason why a library did not compile."""
    return folder / f"{name}-failure.txt"


def _whole(folder: Path, name: str) -> Path | None:
    """Find a compiled library that is complete and safe to load.

    Its digest must be correct, and only this user or root may own and write it. Other files with
    the library's name are removed if possible.
    """
    for library in sorted(folder.glob(f"{name}-*.so")):
        try:
            if _only_ours(library) and library.name == f"{name}-{_digest(library)}.so":
                return library
            library.unlink()
        except OSError:  # it cannot be read, or another process removed it
            continue
    return None


def _only_ours(file: Path) -> bool:
    """True if a file belongs to this user or root, and only its owner can write it."""
    found = file.lstat()
    ours = stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0)
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _sweep(folder: Path) -> None:
    """Remove temporary folders of compilations that were killed."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # another process was faster
            if time.time() - scratch.stat().st_mtime > 2 * _SECONDS:
                shutil.rmtree(scratch)


def _compiler() -> str:
    named = os.environ.get("CXX")
    compiler = shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable(f"no C++ compiler: {named or 'g++ or clang++'} is not in PATH")
    return compiler


def _folder(compiler: str) -> Path:
    """Cache folder for libraries compiled from these sources by this compiler for this CPU."""
    parts = (torch.__version__, compiler, *_flags(), platform.platform(), _cpu(), sources_digest())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    try:
        return cache_folder() / "native" / key
    except WorkhorseError as error:
        raise Unavailable(str(error)) from None


def _flags() -> tuple[str, ...]:
    return *_FLAGS, *compiler_flags()


@functools.cache
def sources_digest() -> str:
    """Digest of all C++ sources. They are assumed not to change while a process runs."""
    digest = hashlib.sha256()
    for source in sorted(_sources().rglob("*")):
        if source.suffix in (".h", ".cpp"):
            digest.update(f"{source.relative_to(_sources())}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _sources() -> Path:
    return Path(str(importlib.resources.files("workhorse.native")))


def _cpu() -> str:
    """Instruction set flags of this CPU, for which `-march=native` compiles."""
    return cpuinfo_field("flags", "Features") or platform.machine() + platform.processor()


def _paths(name: str) -> list[str]:
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    source = _sources() / "bindings" / f"{name}.cpp"
    return [f"-I{_sources()}", *include, str(source), *libraries, "-ltorch_cpu", "-lc10"]


def _run(command: list[str]) -> str | None:
    """Run a compiler command; return its error output if it failed, else None.

    Raises:
        Unavailable: a signal such as Ctrl-C ended the command, or it took too long, for example on
            a busy machine. Neither is a fault of the sources.
    """
    ours, theirs = socket.socketpair()
    with _STARTING:
        compiler = subprocess.Popen(
            # It starts after a line on stdin, and so not if its parent ended before.
            ["/bin/sh", "-c", 'read -r _ && exec "$@"', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        end_with_parent(theirs.fileno(), compiler.pid)
        _COMPILERS.add(compiler)
    with ours, theirs, compiler:
        try:
            _, errors = compiler.communicate("\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"still compiling after {_SECONDS} seconds; the next start tries again"
            ) from None
        finally:
            end_group(compiler)
            _COMPILERS.remove(compiler)
    if compiler.returncode < 0 or "signal terminated program" in errors:  # itself, or its parts
        raise Unavailable("the compiler was ended by a signal; the next start tries again")
    return errors or f"exit status {compiler.returncode}" if compiler.returncode else None


_COMPILERS = set[subprocess.Popen[str]]()
"""The compilers that run now."""
_STARTING = threading.Lock()
"""Held while a compiler starts, and from the end of this process on."""


@atexit.register
def _end_compilers() -> None:
    """End the compilers of this process, which Ctrl-C in the terminal does not reach.

    They run in daemon threads and are leaders of process groups: `g++` leaves the work to others.
    """
    _STARTING.acquire(timeout=10)
    for compiler in [*_COMPILERS]:
        end_group(compiler)


@functools.cache
def _build_in_background(name: str) -> subprocess.Popen[bytes]:
    """Compile a library at low priority in a process that outlives this one.

    The function is cached, so that the process object is not collected while it compiles.
    """
    code = f"import os; from {__name__} import ensure; os.nice(10); ensure({name!r}, wait=True)"
    null = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=null, stdout=null, stderr=null, start_new_session=True
    )
