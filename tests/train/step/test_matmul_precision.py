"""`matmul_precision: high` trains like `highest`, resumes, and restores the global setting."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.native.machine import needs
from tests.train.conftest import MODEL
from tests.train.runs import assert_same_run, step_losses
from tests.train.step.test_step import CPU
from workhorse.checkpoints import RunDirectory
from workhorse.data import Batch
from workhorse.devices.instructions import SWITCH
from workhorse.nn import DecoderConfig
from workhorse.run import train
from workhorse.train import StopSignals
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import Precision, TrainingStep

MLP = {
    "kind": "pre_norm",
    "norm": {"kind": "layer_norm"},
    "attention": {"kind": "attention", "n_heads": 2},
    "feed_forward": {"kind": "mlp", "d_ff": 64, "activation": "gelu"},
}


def step_of(precision: str, **changes: Any) -> TrainingStep:
    torch.manual_seed(1)
    fields = {**MODEL, "vocab_size": 11, "max_seq_len": 8, **changes}
    config = TrainConfig.from_dict(
        {
            "steps": 200,
            "batch_size": 4,
            "seq_len": 8,
            "matmul_precision": precision,
            "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        }
    )
    return build_step(DecoderConfig.from_dict(fields).build(), config, CPU)


def losses(step: TrainingStep, steps: int = 200) -> torch.Tensor:
    """Train on sequences that count by threes, and return the losses."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        starts = torch.randint(11, (4, 1), generator=generator)
        text = (starts + torch.arange(9) * 3) % 11
        rows = Batch(text[:, :-1], text[:, 1:], None, torch.zeros(4, dtype=torch.int64))
        found.append(step.update(*step.backward(rows), schedule=1.0).loss)
    return torch.tensor(found)


@needs("matrix_unit")
@pytest.mark.parametrize("changes", [{}, {"blocks": {"main": MLP}}], ids=["gated", "mlp"])
def test_losses_of_200_steps_are_those_of_highest(changes: dict[str, Any]) -> None:
    """The limit is 0.00005 nats at every step; measured: 0.000001. Losses fall by more than 1."""
    highest, high = (losses(step_of(precision, **changes)) for precision in ("highest", "high"))
    assert highest[0] - highest[-1] > 1
    assert not torch.equal(high, highest)
    assert (high - highest).abs().max() < 0.00005


@needs("matrix_unit")
def test_a_stopped_run_goes_on_as_if_nothing_was(make_recipe, tmp_path: Path) -> None:
    def stop_at_six(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 6:
            signal.raise_signal(signal.SIGINT)

    recipe = make_recipe(matmul_precision="high")
    train(make_recipe(), tmp_path / "highest")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "run", on_event=stop_at_six, signals=StopSignals())
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert step_losses(tmp_path / "whole") != step_losses(tmp_path / "highest")
    assert RunDirectory(tmp_path / "run").recipe()["train"]["matmul_precision"] == "high"


@pytest.mark.parametrize("before", ["highest", "high"])
def test_the_setting_of_the_process_holds_for_the_passes_alone(before: str) -> None:
    """PyTorch's flag applies to CUDA, but can be read on any machine."""
    torch.set_float32_matmul_precision(before)
    try:
        for wanted in ("highest", "high"):
            precision = Precision(torch.device("cuda"), torch.float32, wanted)
            with contextlib.suppress(RuntimeError), precision.products():
                assert torch.get_float32_matmul_precision() == wanted
                raise RuntimeError("as of a device without memory")
            assert torch.get_float32_matmul_precision() == before
            with Precision(CPU, torch.float32, wanted).products():
                assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_without_the_unit_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert torch.equal(losses(step_of("high"), 20), losses(step_of("highest"), 20))
