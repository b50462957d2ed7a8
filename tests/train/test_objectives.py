"""Other things to make less than the next token's cross-entropy, trained by the same step."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workhorse.execute.native_training import train_natively
from workhorse.native import resolve
from workhorse.nn import Decoder, TokenLogprobs
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import build_optimizer
from workhorse.train.objectives.objective import Objective, Outcome
from workhorse.train.step.loss_scale import LossScale
from workhorse.train.step.precision import Precision
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pairs:
    """Texts of which the first of each two is preferred."""

    chosen: Tensor
    rejected: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, start: int, stop: int) -> "Pairs":
        return Pairs(self.chosen[start:stop], self.rejected[start:stop])

    def to(self, device: Any, *, non_blocking: bool = False) -> "Pairs":
        return Pairs(*(text.to(device, non_blocking=non_blocking) for text in vars(self).values()))


class Preference(Objective):
    """`-log sigmoid(mean log p(chosen) - mean log p(rejected))`, summed over pairs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.logprobs = TokenLogprobs()
        self.ends: list[bool] = []

    def count(self, batch: Pairs) -> Tensor:
        return torch.tensor(len(batch))

    def forward(self, batch: Pairs) -> Outcome:
        texts = torch.cat((batch.chosen, batch.rejected))
        x = self.decoder.hidden(texts[:, :-1])
        scores = self.logprobs(x, texts[:, 1:], self.decoder.head).target.mean(dim=1)
        chosen, rejected = scores.chunk(2)
        margins = (chosen - rejected).detach()
        figures = {"margin": margins.sum(), "accuracy": (margins > 0).float().sum()}
        return Outcome(-F.logsigmoid(chosen - rejected).sum(), self.count(batch), figures)

    def after_update(self, finite: bool) -> None:
        self.ends.append(finite)


def step_of(objective: Objective, decoder: Decoder, rows: int) -> TrainingStep:
    return TrainingStep(
        objective,
        build_optimizer(decoder, AdamWConfig(learning_rate=1e-2)),
        CPU,
        precision=Precision(CPU, torch.float32),
        scale=LossScale(enabled=False),
        micro_batch_size=rows,
        grad_clip=1.0,
    )


def pairs() -> Pairs:
    return Pairs(*torch.randint(11, (2, 5, 9), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("native", [False, True])
def test_a_preference_is_learned_by_the_step_that_knows_only_objectives(
    decoder: Decoder, native: bool
) -> None:
    objective = Preference(decoder)
    if native:
        operators = resolve("training", wait=True)
        if reason := operators.why_not.get("training"):
            pytest.skip(reason)
        train_natively(objective, operators)
    step = step_of(objective, decoder, rows=2)
    results = [step.update(*step.backward(pairs()), schedule=1.0) for _ in range(8)]
    assert results[0].loss == pytest.approx(0.69, abs=0.1)
    assert results[-1].loss < 0.5
    assert results[0].tokens == 5
    assert set(results[0].terms) == {"margin", "accuracy"}
    assert results[-1].terms["accuracy"] == 1
    assert results[-1].terms["margin"] > 0.5
    assert objective.ends == [True] * 8


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_its_gradient_does_not_depend_on_the_micro_batches(decoder: Decoder, rows: int) -> None:
    """Five pairs: the last part of them is smaller, and counts as much a pair."""
    found = []
    for size in (5, rows):
        decoder.zero_grad()
        loss, counted = step_of(Preference(decoder), decoder, size).backward(pairs())
        assert counted == 5
        found.append([loss, *(weight.grad for weight in decoder.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)
