"""Campaign: if any file-system call fails, no saved data is lost and no file is half written.

Each call of each operation fails with several errors, once or from then on. The process is also
killed before and after it. `make campaign-faults` runs it and prints its figures. Calls inside C
libraries are not covered.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.failing_calls_operations import OPERATIONS

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(sys.platform != "linux", reason="intercepts calls of glibc"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

SOURCE = Path(__file__).with_name("failing_calls.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "failing_calls.so"
    options = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-w"]
    subprocess.run(["gcc", *options, "-o", str(made), str(SOURCE), "-ldl"], check=True)
    return made


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_saved_is_lost(operation: str, library: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.failing_calls_driver", operation, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    failures = found["failures"]
    print(
        f"\n{operation}: {found['calls']} calls, {found['cases']} faults, {len(failures)} failures"
    )
    assert found["calls"] > 0
    assert not failures, failures[:10]
