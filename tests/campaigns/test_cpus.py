"""Campaign: the computing parts pass their tests on older CPUs, and without a compiler.

    make campaign-cpus    or    python -m pytest -m campaign -s tests/campaigns/test_cpus.py

The tests of operators, training, transforms, generation and loading run once for each instruction
level (`workhorse/devices/instructions.py`). Each run is a separate process in which the operators
are compiled for that level and PyTorch is limited to it. A test that only passes with the rounding
of one CPU fails at another level. Further runs have no native operators, or no compiler for them
and for PyTorch. Levels that this CPU does not have are skipped. A table of the runs is printed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from workhorse.devices.instructions import LEVELS, SWITCH, levels_here

pytestmark = pytest.mark.campaign
ROOT = Path(__file__).parents[2]
TESTS = ["native", "devices", "train", "execute", "transforms", "generate", "model/test_load.py"]
OPTIONS = ["-q", "-m", "not campaign", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]


def _level(name: str, aten: str, onednn: str, mkl: str) -> dict[str, str]:
    return {
        SWITCH: name,
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }


WAYS: dict[str, dict[str, str]] = {
    "x86-64-v2": _level("x86-64-v2", "default", "SSE41", "SSE4_2"),
    "x86-64-v3": _level("x86-64-v3", "avx2", "AVX2", "AVX2"),
    "x86-64-v4": _level("x86-64-v4", "avx512", "AVX512_CORE", "AVX512"),
    "avx512-vnni": _level("avx512-vnni", "avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512-bf16": _level("avx512-bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
    "avx512-bf16-widened": _level("avx512-bf16-widened", "avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx-emulated": _level("amx-emulated", "avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": _level("amx", "avx512", "AVX512_CORE_AMX", "AVX512"),
    "as it is": {},
    "WORKHORSE_NATIVE=0": {SWITCH: "0"},
    "no compiler": {"CXX": "no-such-compiler"},
}
"""Environment variables of each run, by its name in the table."""


def test_every_level_is_tried() -> None:
    assert [name for name in WAYS if name in LEVELS] == list(LEVELS)


@pytest.mark.parametrize("way", WAYS)
def test_the_tests_pass(way: str, tmp_path: Path) -> None:
    if way in LEVELS and way not in levels_here():
        pytest.skip(f"this CPU has only {', '.join(levels_here())}")
    results = tmp_path / "results.xml"
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    # A separate cache, so that PyTorch does not reuse code compiled for another level.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    started = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={results}"),
            *(f"tests/{name}" for name in TESTS),
        ],
        env=environment | WAYS[way],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    assert results.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (suite,) = ElementTree.parse(results).getroot()
    run, skipped, failed = (int(suite.get(count, 0)) for count in ("tests", "skipped", "failures"))
    print(
        f"\n{way:20}{run - skipped - failed:6} passed{skipped:6} skipped{failed:4} failed"
        f"{seconds:6.0f} s"
    )
    assert done.returncode == 0, done.stdout[-6000:]
