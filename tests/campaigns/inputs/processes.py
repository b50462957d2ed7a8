"""Cases that need a separate process: closed streams, encodings, no home, process limits."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.inputs.workplace import state

SECONDS = 120.0

GENERATE = "workhorse generate run --prompt ab --max-new-tokens 9 --seed 1"
VERBS = {
    "generate": GENERATE,
    "json": f"{GENERATE} --json",
    "chat": "workhorse chat run --max-new-tokens 9 --seed 1",
    "evaluate": "workhorse evaluate run",
    "train": "workhorse train recipe.yaml --out out",
    "tokenizer": "workhorse tokenizer train text.txt --vocab-size 280 --out out",
    "presets": "workhorse models list",
    "convert": "workhorse convert run out --to hf",
    "mistake": "workhorse nonsense",
}
STREAMS = {
    "stdin closed": "{} <&-",
    "stdout closed": "{} >&-",
    "stderr closed": "{} 2>&-",
    "all closed": "{} <&- >&- 2>&-",
    "stdout full": "{} >/dev/full",
    "stderr full": "{} 2>/dev/full",
    "stdout gone": "{} | true; exit ${{PIPESTATUS[0]}}",
    "all gone": "{} 2>&1 | true; exit ${{PIPESTATUS[0]}}",
}
LOCALES = {
    "C": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
    "Latin-1": "PYTHONIOENCODING=latin-1",
    "ASCII": "PYTHONIOENCODING=ascii",
    "UTF-16": "PYTHONIOENCODING=utf-16",
}
NO_HOME = {
    "HOME unset": "env -u HOME",
    "HOME empty": "HOME=",
    "HOME nowhere": "HOME=/proc/nothing",
    "HOME a file": "HOME=$PWD/text.txt",
    "HOME relative": "HOME=home",
}
OTHERS = {
    "a prompt that is not UTF-8": "workhorse generate run --max-new-tokens 3 --prompt $'\\xff'",
    "not UTF-8 in JSON": "workhorse generate run --max-new-tokens 3 --json --prompt $'a\\xff'",
    "a path that is not UTF-8": "workhorse generate $'\\xff' --prompt a",
    "data that is not UTF-8": "workhorse evaluate run --data $'\\xff'",
    "an output that is not UTF-8": "workhorse convert run $'out/\\xff' --to hf",
    "a run that is not UTF-8": "workhorse train recipe.yaml --out $'out/\\xff'",
    "a setting that is not UTF-8": "workhorse train recipe.yaml --out out name=$'\\xff'",
    "a key that is not UTF-8": "workhorse train recipe.yaml --out out $'\\xff'=1",
    "a verb that is not UTF-8": "workhorse $'\\xff'",
    "a stop that is not UTF-8": "workhorse generate run --prompt a --stop $'\\xff'",
    "a binary prompt": "workhorse generate run --max-new-tokens 3 --prompt - <binary",
    "a chat with binary input": "workhorse chat run --max-new-tokens 3 <binary",
    "binary data": "workhorse evaluate run --data - <binary",
    "empty data": "workhorse evaluate run --data - </dev/null",
    "text from stdin twice": "workhorse tokenizer train - - --vocab-size 280 --out out <text.txt",
    "a corpus from stdin": "workhorse train recipe.yaml data.corpus=stdin --out out <text.txt",
    "a corpus from closed stdin": "workhorse train recipe.yaml data.corpus=stdin --out out <&-",
    "12 file descriptors": "ulimit -n 12; workhorse generate run --prompt a",
    "40 file descriptors": "ulimit -n 40; workhorse generate run --prompt a --max-new-tokens 3",
    "a limit on file size": "ulimit -f 20; workhorse convert run out --to hf",
    "a limit on file size, for a run": "ulimit -f 20; workhorse train recipe.yaml --out out",
    "a limit on file size, for a tokenizer": VERBS["tokenizer"].replace(
        "workhorse", "ulimit -f 1; workhorse"
    ),
    "a limit on file size, for data": "ulimit -f 0; workhorse data prepare recipe.yaml --out out",
    "removed folder": "mkdir out; cd out; rmdir ../out; workhorse generate run --prompt a",
    "no training folder": "mkdir out; cd out; rmdir ../out; workhorse train r.yaml --out x",
    "no temporary folder": "TMPDIR=/proc/nothing workhorse evaluate run --data - <text.txt",
    "invalid threads": "OMP_NUM_THREADS=x workhorse generate run --prompt a --max-new-tokens 3",
}


class Process(NamedTuple):
    """A shell command line, run in the workplace.

    Attributes:
        told: True if an error message on stderr can be read.
    """

    name: str
    script: str
    told: bool = True


def processes() -> Iterator[Process]:
    for verb, line in VERBS.items():
        for name, form in STREAMS.items():
            told = "stderr" not in name and "all" not in name
            yield Process(f"streams/{verb}/{name}", form.format(line), told)
        for name, setting in LOCALES.items():
            yield Process(f"locales/{verb}/{name}", f"{setting} {line}", name != "UTF-16")
    for verb in ("generate", "train", "convert", "tokenizer", "presets"):
        for name, setting in NO_HOME.items():
            line = VERBS[verb].replace("workhorse", f"{sys.executable} -m workhorse")
            # A compiler that fails at once, so that the operators are not compiled for each case.
            script = f"unset XDG_CACHE_HOME; {setting} CXX=false {line}"
            yield Process(f"home/{verb}/{name}", script)
    for name, line in OTHERS.items():
        yield Process(f"others/{name}", line)


def run(process: Process, place: Path) -> dict[str, Any]:
    """Run it and return its result, in the format of `driver.examine`."""
    before = state(place)
    environment = {
        **os.environ,
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHON": sys.executable,
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
    }
    environment.pop("LC_ALL", None)
    script = f'workhorse() {{ "$PYTHON" -m workhorse "$@"; }}\n{process.script}\n'
    started = time.perf_counter()
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            input=b"hello\n",
            capture_output=True,
            timeout=SECONDS,
            cwd=place,
            env=environment,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, out, err = None, expired.stdout or b"", expired.stderr or b""
    after = state(place)
    return {
        "name": process.name,
        "code": code,
        "seconds": time.perf_counter() - started,
        "bytes": 0,
        "stdout": out.decode(errors="backslashreplace"),
        "stderr": err.decode(errors="backslashreplace"),
        "changed": sorted(
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        ),
    }
