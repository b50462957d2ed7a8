"""Campaign: the resident memory of a training step, compared with the prediction."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from workhorse.devices.memory import MIB
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.models import preset
from workhorse.native import resolve
from workhorse.nn import DecoderConfig
from workhorse.train.recipe.training import TrainConfig

pytestmark = pytest.mark.campaign
CPU = torch.device("cpu")
WITHIN = 0.08
MUON = {"kind": "muon", "learning_rate": 1e-3}
SMALLER = {"n_layers": 4, "vocab_size": 16384, "max_seq_len": 512}
"""Smaller sizes for models that would take minutes per step; widths are unchanged."""
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("gpt2", {"n_layers": 4}, {}),
    ("gpt2", {"n_layers": 4}, {"dtype": "bfloat16"}),
    (
        "gpt2",
        {"n_layers": 4},
        {"dtype": "bfloat16", "activation_checkpointing": True, "batch_size": 8},
    ),
    ("gpt2", {"n_layers": 4}, {"kernel": "eager", "batch_size": 8}),
    ("gpt2", {"n_layers": 4}, {"batch_size": 8, "micro_batch_size": 2}),
    ("gpt2", {"n_layers": 4}, {"dtype": "bfloat16", "batch_size": 8, "optimizer": MUON}),
    ("smollm2-135m", SMALLER, {"dtype": "bfloat16", "batch_size": 8}),
    ("smollm2-135m", SMALLER, {"batch_size": 4, "micro_batch_size": 1}),
    ("smollm2-135m", SMALLER, {"activation_checkpointing": True, "batch_size": 8}),
    ("qwen3-0.6b", {**SMALLER, "n_layers": 2}, {"dtype": "bfloat16", "batch_size": 4}),
    ("olmo-1b", {**SMALLER, "n_layers": 1}, {"dtype": "bfloat16", "optimizer": MUON}),
)


def measured(config: DecoderConfig, train: TrainConfig) -> int:
    """Peak bytes that two steps add to a separate process."""
    given = json.dumps({"config": config.to_dict(), "train": train.to_dict()})
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.resident"],
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(resolve("heap", wait=True).heap is None, reason="glibc's heap scatters blocks")
def test_resident_memory_is_the_predicted() -> None:
    print("\n| model | settings | predicted, MiB | resident, MiB | difference |")
    print("|---|---|---|---|---|")
    off: dict[str, float] = {}
    for name, changes, settings in CASES:
        config = preset(name).replace(**changes)
        train = TrainConfig(
            **{
                "steps": 1,
                "batch_size": 2,
                "seq_len": 256,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
                **settings,
            }
        )
        predicted, taken = (
            max(step_memory(PlannedStep(config, train, CPU)).totals),
            measured(config, train),
        )
        difference = predicted / taken - 1
        case = f"{name}, {config.n_layers} layers | {json.dumps(settings)[1:-1]}"
        off[case] = difference
        print(f"| {case} | {predicted / MIB:,.0f} | {taken / MIB:,.0f} | {difference:+.1%} |")
    wrong = {case: difference for case, difference in off.items() if abs(difference) > WITHIN}
    assert not wrong
