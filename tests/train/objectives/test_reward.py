"""The loss of reward models against the papers' formulas, in float64."""

from dataclasses import replace

import pytest
import torch

from tests.train.objectives.data import assert_same, model, rows
from workhorse.config.base import ConfigError
from workhorse.nn import IGNORE
from workhorse.train.objectives.reward import RewardConfig

LAST = [8, 7, 6, 5, 8, 7, 6, 5]
"""Position after the last target of each row."""


def test_it_is_the_bradley_terry_loss_with_margins_and_centring() -> None:
    decoder, batch = model(), rows()
    margins = torch.tensor([0.3, 0.0, 1.5, 0.2])
    batch = replace(batch, values=margins.repeat_interleave(2))
    logits = decoder(batch.tokens)[..., 4]
    rewards = torch.stack([logits[row, last - 1] for row, last in enumerate(LAST)])
    chosen, rejected = rewards[0::2], rewards[1::2]
    losses = (1 + (rejected - chosen + margins).exp()).log() + 0.01 * (chosen + rejected) ** 2
    objective = RewardConfig(token=4, centre=0.01).build(decoder)
    assert_same(objective, batch, losses.mean())
    figures = objective(batch).figures
    torch.testing.assert_close(figures["margin"], (chosen - rejected).sum().detach())
    torch.testing.assert_close(figures["accuracy"].double(), (chosen > rejected).sum().double())


def test_a_reward_does_not_depend_on_padding_or_what_follows_the_answer() -> None:
    decoder, batch = model(), rows()
    objective = RewardConfig(token=4).build(decoder)
    before, real = objective.rewards(batch)
    assert real.all()
    after = replace(batch, tokens=batch.tokens.clone())
    for row, last in enumerate(LAST):
        after.tokens[row, last:] = 0
    assert torch.equal(objective.rewards(after)[0], before)
    after.tokens[0, LAST[0] - 1] += 1
    changed = objective.rewards(after)[0] != before
    assert changed.tolist() == [True] + [False] * 7
    padding = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    outcome = objective(padding)
    assert outcome.loss == outcome.count == objective.count(padding) == 0


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="token=11 is not in a vocabulary of 11 tokens"):
        RewardConfig(token=11).build(model())
