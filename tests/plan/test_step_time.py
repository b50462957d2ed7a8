"""The simulated time of a step on one device."""

import pytest
import torch

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.memory.step_memory import PlannedStep
from workhorse.models import find_preset
from workhorse.models.describe import forward_flops
from workhorse.plan.devices import find_device
from workhorse.plan.plan import failures
from workhorse.plan.step_time import StepTime, simulated_step
from workhorse.train.recipe.training import TrainConfig


def step(adapter: AdapterConfig | None = None, **fields: object) -> StepTime:
    adamw = {"kind": "adamw", "learning_rate": 1e-3}
    given = {"steps": 1, "batch_size": 64, "seq_len": 512, "dtype": "bfloat16", "optimizer": adamw}
    config = find_preset("gpt2").config.replace(n_layers=4)
    train = TrainConfig(**{**given, **fields})
    planned = PlannedStep(config, train, torch.device("cuda"), adapter=adapter)
    return simulated_step(planned, find_device("a100"))


def test_an_adapter_has_no_gradients_of_frozen_weights() -> None:
    whole, lora = step(), step(AdapterConfig(rank=4))
    flops = forward_flops(find_preset("gpt2").config.replace(n_layers=4).build(device="meta"), 512)
    scores = flops["scores"] // 2  # a causal mask hides half of them
    weights = sum(flops.values()) - flops["scores"]
    part = (2 * weights + 3 * scores) / (3 * weights + 3 * scores)
    assert lora.compute == pytest.approx(part * whole.compute, rel=0.15)  # and memory traffic
    assert lora.optimizer < 0.02 * whole.optimizer


def test_micro_batches_and_recomputation_take_time() -> None:
    whole, parts = step(), step(micro_batch_size=16)
    assert parts.compute == pytest.approx(whole.compute, rel=0.01)
    assert parts.optimizer == whole.optimizer
    assert step(activation_checkpointing=True).compute > 1.1 * whole.compute


def test_failures() -> None:
    """Llama 3's failure rate is for 16,384 devices; rare checkpoints reduce the goodput."""
    train = TrainConfig(
        **{"steps": 100, "batch_size": 1, "seq_len": 8, "checkpoint_every": 1},
        optimizer={"kind": "adamw", "learning_rate": 1e-3},
    )
    seconds = 54 * 86_400.0
    assert failures(train, seconds, 16_384)["expected"] == pytest.approx(419)
    rarely = train.replace(checkpoint_every=50)
    often, rare = (failures(one, seconds, 16_384)["goodput"] for one in (train, rarely))
    assert 0 < rare < often < 1
