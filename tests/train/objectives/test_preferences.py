"""Preference objectives against the formulas of their papers, in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.train.objectives.data import assert_same, gradients, logprobs, model, rows
from workhorse.config.base import ConfigError
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder
from workhorse.train.objectives.objective import ObjectiveConfig
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig

DECODER = model()


def sums(batch: Batch, decoder: Decoder = DECODER) -> tuple[Tensor, Tensor]:
    """The log-probability of each answer, and its number of tokens."""
    return logprobs(decoder, batch).sum(dim=1), (batch.targets != IGNORE).sum(dim=1).double()


def log_sigmoid(x: Tensor) -> Tensor:
    return (1 / (1 + (-x).exp())).log()


def dpo(batch: Batch, beta: float) -> Tensor:
    """The margin of each pair: 2305.18290 eq. 7."""
    answer, _ = sums(batch)
    ratios = answer - batch.reference
    return beta * (ratios[0::2] - ratios[1::2])


Formula = Callable[[Tensor, float, float], Tensor]
FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda h, b, e: -(1 - e) * log_sigmoid(b * h) - e * log_sigmoid(-b * h),
    "hinge": lambda h, b, _: (1 - b * h).clamp(min=0),
    "ipo": lambda h, b, _: (h - 1 / (2 * b)).square(),
    "robust": lambda h, b, e: (
        -((1 - e) * log_sigmoid(b * h) - e * log_sigmoid(-b * h)) / (1 - 2 * e)
    ),
}
"""By `loss`, the formula of its paper: of the difference h of the log-ratios, beta and ε."""


@pytest.mark.parametrize("loss", get_args(DpoConfig.model_fields["loss"].annotation))
def test_each_loss_of_dpo_is_the_papers(loss: str) -> None:
    assert loss in FORMULAS, f"add the paper's formula of loss={loss} to FORMULAS"
    batch = rows()
    ratios = dpo(batch, beta=1.0)
    assert (0.3 * ratios > 1).any()
    assert (0.3 * ratios < 1).any()
    plain, smoothed = (FORMULAS[loss](ratios, 0.3, epsilon).mean() for epsilon in (0.0, 0.2))
    assert_same(DpoConfig(loss=loss, beta=0.3).build(DECODER), batch, plain)
    if torch.equal(plain, smoothed):
        with pytest.raises(ConfigError, match=f"label_smoothing=0.2 has no effect on loss={loss}"):
            DpoConfig(loss=loss, label_smoothing=0.2)
    else:
        objective = DpoConfig(loss=loss, beta=0.3, label_smoothing=0.2).build(DECODER)
        assert_same(objective, batch, smoothed)


def test_rewards_per_token_and_the_likelihood_of_the_chosen_answer() -> None:
    batch = rows()
    answer, length = sums(batch)
    rewards = 0.3 * (answer - batch.reference) / length
    margins = rewards[0::2] - rewards[1::2]
    likelihood = -(answer / length)[0::2].mean()
    objective = DpoConfig(beta=0.3, per_token=True, sft_weight=0.7).build(DECODER)
    assert_same(objective, batch, -log_sigmoid(margins).mean() + 0.7 * likelihood)


def test_orpo_is_the_papers() -> None:
    batch = rows()
    answer, length = sums(batch)
    p = (answer / length).exp()
    odds = p / (1 - p)
    preferred = -log_sigmoid((odds[0::2] / odds[1::2]).log()).mean()
    expected = -(answer / length)[0::2].mean() + 0.2 * preferred
    assert_same(OrpoConfig(beta=0.2).build(DECODER), batch, expected)


def test_simpo_is_the_papers() -> None:
    batch = rows()
    answer, length = sums(batch)
    means = answer / length
    expected = -log_sigmoid(2.5 * means[0::2] - 2.5 * means[1::2] - 0.8).mean()
    assert_same(SimpoConfig(beta=2.5, gamma=0.8).build(DECODER), batch, expected)
    likelihood = SimpoConfig(beta=2.5, gamma=0.8, sft_weight=0.5).build(DECODER)
    assert_same(likelihood, batch, expected - 0.5 * means[0::2].mean())


def test_kto_is_the_papers_with_a_reference_point_from_the_step_before() -> None:
    batch, weights = rows(), (1.3, 0.8)
    config = KtoConfig(beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1])
    objective = config.build(DECODER)

    def loss(point: float) -> Tensor:
        """2402.01306 §4.1, for a given z."""
        rewards = sums(batch)[0] - batch.reference
        v = torch.stack(
            [
                weights[0] / (1 + (-0.3 * (reward - point)).exp())
                if desirable
                else weights[1] / (1 + (-0.3 * (point - reward)).exp())
                for reward, desirable in zip(rewards, batch.values, strict=True)
            ]
        )
        of_labels = torch.where(batch.values > 0, *map(torch.tensor, weights)).double()
        return (of_labels - v).mean()

    assert_same(objective, batch, loss(0.0))
    objective.forget()
    lower = replace(batch, reference=batch.reference - 20)
    for start in (0, 2, 6):  # micro-batches of any size
        objective(lower.rows(start, {0: 2, 2: 6, 6: 8}[start]))
    objective.after_update(finite=True)
    mean = (sums(lower)[0] - lower.reference).mean().item()
    assert mean > 0
    assert objective.point == pytest.approx(mean, rel=1e-12)
    assert objective.tallies() == []
    assert_same(objective, batch, loss(mean))
    again = config.build(DECODER)
    again.load(objective.state())
    assert again.point == objective.point
    objective.forget()
    objective(replace(batch, reference=batch.reference + 99))
    objective.after_update(finite=True)
    assert objective.point == 0  # the KL divergence is not negative


def test_kto_without_a_point_and_after_a_bad_step_keeps_it() -> None:
    batch = replace(rows(), reference=torch.full((8,), -99.0))
    for kl, finite, moved in ((True, True, True), (True, False, False), (False, True, False)):
        objective = KtoConfig(kl=kl).build(DECODER)
        objective(batch)
        objective.after_update(finite=finite)
        assert (objective.point > 0) is moved
        objective.eval()
        objective(batch)
        assert objective.tallies() == []  # validation does not change the point


PAIRED: list[ObjectiveConfig] = [
    DpoConfig(sft_weight=0.5),
    DpoConfig(loss="ipo", per_token=True),
    OrpoConfig(),
    SimpoConfig(),
]


@pytest.mark.parametrize("config", [*PAIRED, KtoConfig()], ids=lambda one: one.kind)
def test_rows_of_padding_add_nothing(config: ObjectiveConfig) -> None:
    """The last validation batch has rows without predictions; also their gradient is finite."""
    batch, objective = rows(4), config.build(DECODER)
    padded = rows(8)
    for name in ("tokens", "targets", "values", "reference"):
        getattr(padded, name)[:4] = getattr(batch, name)
    padded.tokens[4:] = 0
    padded.targets[4:] = IGNORE
    ours, alone = objective(padded), objective(batch)
    assert objective.count(padded) == ours.count == alone.count
    torch.testing.assert_close(ours.loss, alone.loss)
    assert ours.figures.keys() == alone.figures.keys()
    for name, figure in alone.figures.items():
        torch.testing.assert_close(ours.figures[name], figure)
    torch.testing.assert_close(gradients(DECODER, ours.loss), gradients(DECODER, alone.loss))


@pytest.mark.parametrize("config", [*PAIRED, KtoConfig()], ids=lambda one: one.kind)
def test_weights_of_tokens_weigh_the_log_probabilities(config: ObjectiveConfig) -> None:
    """A token of weight 0 is like one without a target, one of weight 2 counts twice."""
    batch = rows()
    weights = torch.ones(batch.targets.shape)
    weights[:, 3] = 0
    objective = config.build(DECODER)
    weighted = replace(batch, weights=weights)
    left_out = replace(batch, targets=batch.targets.clone())
    left_out.targets[:, 3] = IGNORE
    torch.testing.assert_close(objective(weighted).loss, objective(left_out).loss)
    assert not torch.allclose(objective(weighted).loss, objective(batch).loss)
    twice = replace(batch, weights=torch.full(batch.targets.shape, 2.0))
    torch.testing.assert_close(objective.sequence_logprobs(twice), 2 * sums(batch)[0])
    torch.testing.assert_close(objective.sequence_weights(twice).double(), 2 * sums(batch)[1])


def test_figures_are_sums_over_pairs() -> None:
    batch = rows()
    answer, _ = sums(batch)
    rewards = 0.1 * (answer - batch.reference)
    figures = DpoConfig().build(DECODER)(batch).figures
    margins = rewards[0::2] - rewards[1::2]
    expected = {
        "reward_chosen": rewards[0::2].sum(),
        "reward_rejected": rewards[1::2].sum(),
        "margin": margins.sum(),
        "accuracy": (margins > 0).sum(),
        "logp_chosen": answer[0::2].sum(),
        "logp_rejected": answer[1::2].sum(),
    }
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name].item() == pytest.approx(value.item(), rel=1e-6)
        assert not figures[name].requires_grad


def test_odds_of_a_certain_answer_are_finite() -> None:
    """A probability of 1 in float32 would give infinite odds and a NaN gradient."""
    decoder = model().float()
    with torch.no_grad():
        decoder.embedding.tokens.weight.mul_(1e3)
    batch = replace(rows(2), targets=torch.full((2, 8), IGNORE))
    batch.targets[:, 0] = decoder(batch.tokens)[:, 0].argmax(dim=-1)
    objective = OrpoConfig().build(decoder)
    assert objective.sequence_logprobs(batch).eq(0).all()
    loss = objective(batch).loss
    assert math.isfinite(loss.item())
    assert all(gradient.isfinite().all() for gradient in gradients(decoder, loss))


def test_a_label_smoothing_of_one_half_is_refused() -> None:
    with pytest.raises(ConfigError, match="label_smoothing"):
        DpoConfig(loss="robust", label_smoothing=0.5)
