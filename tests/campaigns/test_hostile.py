"""Campaign: malicious model directories give a one-line error, quickly and with little memory.

`make campaign-hostile` runs it and prints its figures. No code is run, and no file outside
the directory is read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.hostile import config_cases, text_cases, weight_cases
from tests.campaigns.hostile.directories import Case, make

pytestmark = pytest.mark.campaign

CASES = config_cases.CASES | weight_cases.CASES | text_cases.CASES
DRIVER = Path(__file__).parent / "hostile" / "driver.py"
SECONDS = 1.0  # of CPU time; the elapsed time is longer on a busy machine
PASSED = 5.0  # elapsed; more means that it waits for something
BYTES = 200_000_000
TIMEOUT = 120


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of all cases. A case that hangs or kills the driver is recorded as crashed."""
    root = tmp_path_factory.mktemp("hostile")
    nothing = Case(lambda folder: None, None)
    make(nothing, root / "sound")
    names = [*CASES, "nothing"]
    folders = [root / f"{number:03d}" for number in range(len(names))]
    for name, folder in zip(names, folders, strict=True):
        make(CASES.get(name, nothing), folder)
    found: dict[str, dict[str, Any]] = {}
    left = dict(zip((folder.name for folder in folders), names, strict=True))
    while left:
        done = _drive(root / "sound", [root / number for number in left])
        found |= {left.pop(number): result for number, result in done.items()}
    slowest = max(found, key=lambda name: found[name]["seconds"])
    largest = max(found, key=lambda name: found[name]["bytes"])
    refused = sum(result["refused"] is not None for result in found.values())
    print(
        f"\n{len(CASES)} hostile directories, {refused} refused; "
        f"slowest {found[slowest]['seconds']:.2f} s ({slowest}), "
        f"largest {found[largest]['bytes'] / 1e6:.0f} MB ({largest})"
    )
    return found


def _drive(sound: Path, folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Results by folder. If the process dies or hangs, the last result says so."""
    command = [sys.executable, str(DRIVER), str(sound), *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False
        )
        output, why = process.stdout, process.stderr[-2000:]
    except subprocess.TimeoutExpired as expired:
        output, why = (expired.stdout or b"").decode(), "never ended"
    lines = output.splitlines()
    assert lines, why
    done = {
        number: json.loads(result) for number, result in zip(lines[::2], lines[1::2], strict=False)
    }
    if len(done) < len(folders):
        nothing = {"refused": None, "wrote": "", "bytes": 0, "outside": [], "executed": False}
        done[lines[-1]] = {**nothing, "seconds": 0.0, "passed": float(TIMEOUT), "crashed": why}
    return done


@pytest.mark.parametrize("name", CASES)
def test_harmless(results: dict[str, dict[str, Any]], name: str) -> None:
    case, result = CASES[name], results[name]
    assert not result["crashed"], result["crashed"]
    assert not result["executed"]
    assert "__" not in result["wrote"]  # no template reached Python's internal objects
    assert "<class" not in result["wrote"]
    assert result["outside"] == []
    assert result["bytes"] < BYTES
    assert result["seconds"] < SECONDS
    assert result["passed"] < PASSED
    line = result["refused"]
    if case.says is not None:
        assert line is not None, "it was loaded"
        assert case.says in line
    if line is not None:
        assert "\n" not in line
        assert 20 < len(line) < 500


def test_the_sound_directory_is_used(results: dict[str, dict[str, Any]]) -> None:
    assert results["nothing"]["refused"] is None
    assert not results["nothing"]["crashed"]


def test_what_is_read_outside_would_be_seen(tmp_path: Path) -> None:
    """The watch reports reads of `outside`; here the loaded model itself is watched."""
    make(Case(lambda folder: None, None), tmp_path / "it")
    (tmp_path / "it" / "outside").rename(tmp_path / "elsewhere")
    (tmp_path / "it" / "outside").symlink_to("model")
    [result] = _drive(tmp_path / "it", [tmp_path / "it"]).values()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(result["outside"])
