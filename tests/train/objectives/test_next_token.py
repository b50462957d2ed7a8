"""Dynamic fine-tuning against its paper's formula, in float64."""

from dataclasses import replace

import torch

from tests.train.objectives.data import assert_same, logprobs, model, rows
from workhorse.train.objectives.next_token import NextTokenConfig


def test_dynamic_fine_tuning_weighs_each_token_by_its_probability() -> None:
    decoder = model()
    weights = torch.rand(8, 8, generator=torch.Generator().manual_seed(3))
    batch = replace(rows(), weights=weights)
    each = logprobs(decoder, batch)
    weights = weights * (batch.targets >= 0)
    expected = -(each.detach().exp() * each * weights).sum() / weights.sum()
    objective = NextTokenConfig(dft=True).build(decoder)
    assert_same(objective, batch, expected)
    figures = objective(batch).figures
    torch.testing.assert_close(figures["loss"], -(each * weights).sum().detach())
    torch.testing.assert_close(figures["dft_loss"] / weights.sum(), expected.detach())


def test_its_z_loss_is_that_of_the_cross_entropy() -> None:
    decoder, batch = model(), rows()
    plain, dynamic = (
        NextTokenConfig(z_loss=0.01, dft=dft).build(decoder)(batch) for dft in (False, True)
    )
    torch.testing.assert_close(plain.figures["z_loss"], dynamic.figures["z_loss"])
    loss = dynamic.figures["dft_loss"] + dynamic.figures["z_loss"]
    torch.testing.assert_close(dynamic.loss.detach(), loss)
    validated = NextTokenConfig(z_loss=0.01, dft=True).build(decoder).eval()(batch)
    assert "z_loss" not in validated.figures
    torch.testing.assert_close(validated.figures["loss"], plain.figures["loss"])
