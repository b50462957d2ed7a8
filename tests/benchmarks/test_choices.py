"""The measurements of design choices that count CPU time."""

import pytest
import torch

from benchmarks import choices
from benchmarks.harness.shapes import TRAINING


def test_cpu_time_leaves_out_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([2.0, 2.5])
    monkeypatch.setattr(choices.time, "process_time", lambda: next(clock))
    assert choices._cpu_seconds(lambda: None) == 0.5


@pytest.mark.parametrize("name", choices.NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_is_measured(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "NORM_ROWS", 4)
    measures = choices.norm(name=name, dtype=dtype, threads=torch.get_num_threads())()
    assert measures["tokens"] > 0


def test_every_kernel_of_a_gpt2_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choices.STORED, "gpt2", TRAINING["tiny"])
    for settings in choices.KERNELS.values():
        measure = choices.gpt2(settings=settings, dtype="float32", threads=1)
        assert measure()["tokens"] > 0
