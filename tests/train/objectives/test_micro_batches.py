"""Every objective gives the same step however its batch is divided, and learns."""

import copy

import pytest
import torch

from tests.train.objectives.data import SEQ, model, rollouts, rows
from workhorse.data import Batch
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.nn import Decoder
from workhorse.optim.adamw import AdamWConfig
from workhorse.train import TrainConfig
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.objective import ObjectiveConfig
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from workhorse.train.objectives.reward import RewardConfig
from workhorse.train.rollouts import RolloutConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")
ALL: list[ObjectiveConfig] = [
    NextTokenConfig(dft=True, z_loss=0.01),
    DpoConfig(sft_weight=0.5),
    DpoConfig(loss="ipo"),
    DpoConfig(loss="robust", label_smoothing=0.1),
    KtoConfig(),
    OrpoConfig(),
    SimpoConfig(),
    RewardConfig(token=3, centre=0.1),
    PolicyConfig(clip_low=0.2, clip_high=0.2, kl_weight=0.1),
    PolicyConfig(values={}, denominator="sequences"),
    PolicyConfig(ratio="sequence", clip_high=0.2, denominator="sequences", entropy_weight=0.1),
    PolicyConfig(clip="weight", clip_high=0.2, denominator="constant", max_length=9),
]


def name(config: ObjectiveConfig) -> str:
    return "-".join(map(str, vars(config).values()))


def batch_of(objective: ObjectiveConfig) -> Batch:
    return rollouts(model()) if objective.kind == "policy" else rows()


def config_of(objective: ObjectiveConfig, micro_batch: int) -> TrainConfig:
    return TrainConfig(
        steps=9,
        batch_size=8,
        seq_len=SEQ,
        micro_batch_size=micro_batch,
        optimizer=AdamWConfig(),
        objective=objective,
        rollouts=RolloutConfig(baseline="none") if objective.kind == "policy" else None,
        grad_clip=None,
    )


def step_of(decoder: Decoder, objective: ObjectiveConfig, micro_batch: int) -> TrainingStep:
    return build_step(copy.deepcopy(decoder), config_of(objective, micro_batch), CPU)


@pytest.mark.parametrize("objective", ALL, ids=name)
def test_micro_batches_do_not_change_the_gradient(objective: ObjectiveConfig) -> None:
    """Micro-batches of 2 and 6 rows of different lengths, which is also how ranks divide rows."""
    decoder, batch = model().float(), batch_of(objective)
    whole = step_of(decoder, objective, 8)
    expected, counted = whole.backward(batch)
    gradients = whole.optimizer.gradients()
    for size in (2, 6):
        step = step_of(decoder, objective, size)
        loss, count = step.backward(batch)
        assert count == counted
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        found = step.optimizer.gradients()
        assert len(found) == len(gradients) > 0
        for ours, theirs in zip(found, gradients, strict=True):
            scale = max(1.0, theirs.abs().max().item())
            torch.testing.assert_close(ours, theirs, atol=1e-6 * scale, rtol=1e-6)
        assert step.terms.keys() == whole.terms.keys()
        for figure, value in whole.terms.items():
            torch.testing.assert_close(step.terms[figure], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", ALL[:-1], ids=name)
def test_steps_reduce_the_loss(objective: ObjectiveConfig) -> None:
    """Except the last, whose value changes with the weights although its gradient does not."""
    step, batch = step_of(model().float(), objective, 4), batch_of(objective)
    losses = [step.update(*step.backward(batch), schedule=5.0).loss for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("objective", [DpoConfig(), PolicyConfig(values={})], ids=name)
def test_the_memory_of_a_step_can_be_computed(objective: ObjectiveConfig) -> None:
    found = step_memory(PlannedStep(model().config, config_of(objective, 4), CPU))
    assert max(found.totals) > 0
