"""Compile the operators of this package once per machine.

`torch.compile` needs a C++ compiler on a CPU; this uses the same one. The library goes to
`native/KEY/` in the user's cache folder, the key standing for the sources, the compiler, PyTorch
and the CPU, so that a shared home directory serves several machines.
"""

import functools
import hashlib
import importlib.resources
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

from workhorse.devices import cache_folder
from workhorse.errors import WorkhorseError

SWITCH = "WORKHORSE_NATIVE"
"""Set this environment variable to 0 and nothing native is built or loaded."""

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++20", "-fPIC", "-shared")
_SECONDS = 300


class Unavailable(Exception):
    """Why there are no native operators here, in one line."""


def ensure(name: str = "operators", *, wait: bool) -> Path:
    """The compiled library, made if it is not there.

    Args:
        name: of the source, `NAME.cpp` of this package.
        wait: compile now. Otherwise a process of its own compiles, and the next start finds the
            library.

    Raises:
        Unavailable: switched off, no compiler, no place to write, it does not compile or, without
            `wait`, is not there yet. A failure is remembered and not tried again.
    """
    if os.environ.get(SWITCH) == "0":
        raise Unavailable(f"{SWITCH}=0")
    compiler = _compiler()
    try:
        folder = _folder(compiler)
    except WorkhorseError as error:  # no place to keep it
        raise Unavailable(str(error)) from None
    library, failure = folder / f"{name}.so", folder / f"{name}-failure.txt"
    if library.exists():
        return library
    if failure.exists():
        raise Unavailable(f"did not compile before; see {failure}, remove it to try again")
    if not wait:
        _build_in_background(name)
        raise Unavailable("being compiled for the next start")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Two processes at once each make their own, and one stays.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made, report = Path(scratch) / library.name, Path(scratch) / failure.name
            problem = _run([compiler, *_FLAGS, *_paths(name), "-o", str(made)])
            if problem is None:
                return made.replace(library)
            report.write_text(problem, encoding="utf-8")
            report.replace(failure)
    except OSError as error:
        raise Unavailable(f"cannot compile into {folder}: {error.strerror}") from None
    raise Unavailable(f"did not compile; see {failure}")


def load(library: Path) -> None:
    """Let PyTorch know a library's operators.

    Raises:
        Unavailable: it cannot be loaded.
    """
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise Unavailable(f"cannot load {library}: {error}".splitlines()[0]) from None


def _compiler() -> str:
    named = os.environ.get("CXX")
    compiler = shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable(f"no C++ compiler: {named or 'g++ or clang++'} is not in PATH")
    return compiler


def _folder(compiler: str) -> Path:
    """Where the library of these sources for this machine belongs."""
    parts = (torch.__version__, compiler, *_FLAGS, platform.platform(), _cpu())
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(_sources().iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.read_bytes())
    return cache_folder() / "native" / digest.hexdigest()[:16]


def _sources() -> Path:
    return Path(str(importlib.resources.files("workhorse.native")))


def _cpu() -> str:
    """The instructions this CPU has: `-march=native` compiles for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _paths(name: str) -> list[str]:
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*include, str(_sources() / f"{name}.cpp"), *libraries, "-ltorch_cpu", "-lc10"]


def _run(command: list[str]) -> str | None:
    """What the command said if it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"still compiling after {_SECONDS} seconds"
    return done.stderr or f"exit status {done.returncode}" if done.returncode else None


@functools.cache
def _build_in_background(name: str) -> subprocess.Popen[bytes]:
    """Compile at low priority, outliving this process. Kept: Python complains of forgotten ones."""
    code = f"import os; from {__name__} import ensure; os.nice(10); ensure({name!r}, wait=True)"
    null = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=null, stdout=null, stderr=null, start_new_session=True
    )
