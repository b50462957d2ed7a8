"""Campaign: every pinned error is caught by its tests.

    make campaigns    or    python -m pytest -m campaign tests/campaigns/test_mutations.py

For each entry of `mutations.yaml`, and of `family_mutations.yaml` (mistakes in config readers and
name maps), the package's source is copied to a temporary folder. The error is inserted into the
copy by replacing a string. The pinning tests then run in a process that imports the copy (first on
PYTHONPATH). Every pinning test must fail as a test, not because it cannot be collected. The same
tests pass with an unchanged copy.

Two of the circulating errors (tests/nn/test_circulating_errors.py) have no entry, since they are
wrong claims that code cannot contain: 11 (scores of shared queries and keys are symmetric, weights
are not; the test shows it) and 13 (which positions extrapolate; decided by an experiment).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workhorse.config.base import parse_yaml

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "workhorse"
PARITY = "parity/test_families.py::test_parity"


def read_mutations() -> list[dict[str, Any]]:
    """The entries of both files; the cases of a family mutation become pins of the parity test."""
    general, families = (
        parse_yaml(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        for name in ("mutations.yaml", "family_mutations.yaml")
    )
    pinned = [one | {"pins": [f"{PARITY}[{case}]" for case in one["cases"]]} for one in families]
    return general + pinned


MUTATIONS = read_mutations()
PINS = sorted({pin for mutation in MUTATIONS for pin in mutation["pins"]})
OPTIONS = ["-q", "-m", "not campaign", "-rf", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
CHECK = """
import pathlib, sys, workhorse
assert pathlib.Path(workhorse.__file__).is_relative_to(sys.argv[1]), workhorse.__file__
"""


def copy_of_the_source(folder: Path) -> Path:
    shutil.copytree(SOURCE, folder / "workhorse", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def outcome(folder: Path, pins: list[str]) -> tuple[int, set[str], str]:
    """Exit code, names of the tests that failed, and the output, with `folder` as the source."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(
        [sys.executable, "-c", CHECK, str(folder)], env=environment, cwd=ROOT, check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *(f"tests/{pin}" for pin in pins)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    failed = set(re.findall(r"^FAILED tests/(\S+)", done.stdout, flags=re.MULTILINE))
    return done.returncode, failed, done.stdout + done.stderr


@pytest.mark.campaign
def test_the_pinning_tests_pass_without_an_error(tmp_path: Path) -> None:
    code, failed, output = outcome(copy_of_the_source(tmp_path), PINS)
    assert (code, failed) == (0, set()), output[-2000:]


@pytest.mark.campaign
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["name"])
def test_an_error_is_caught(mutation: dict[str, Any], tmp_path: Path) -> None:
    folder = copy_of_the_source(tmp_path)
    for change in mutation["changes"]:
        path = folder / "workhorse" / change["file"]
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(change["old"], change["new"]), encoding="utf-8")
    code, failed, output = outcome(folder, mutation["pins"])
    assert code == 1, output[-2000:]  # 1: tests failed; 2 to 5: they could not run
    caught = {pin for pin in mutation["pins"] if any(name.startswith(pin) for name in failed)}
    assert caught == set(mutation["pins"]), output[-2000:]
