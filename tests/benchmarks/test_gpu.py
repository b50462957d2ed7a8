"""The GPU blocks, run on a CPU: each has checks, and results of checks are saved."""

import importlib
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import BLOCKS
from benchmarks.gpu.block import Setting, run


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(torch.device("cpu"), tiny=True, models=tmp_path)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_names_its_checks(block: str, setting: Setting) -> None:
    names = [
        check.name for check in importlib.import_module(f"benchmarks.gpu.{block}").checks(setting)
    ]
    assert names
    assert len(set(names)) == len(names)


def test_a_check_gives_figures(setting: Setting) -> None:
    checks = importlib.import_module("benchmarks.gpu.memory").checks
    first, second = itertools.islice(run("memory", checks, setting, 60.0), 2)
    assert 0 <= first["off_eager"] < 0.02
    assert "error" not in second
