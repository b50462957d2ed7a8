"""Dynamic fine-tuning and label smoothing against their formulas, in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.train.conftest import MakeRecipe
from tests.train.objectives.data import assert_same, logprobs, model, rows
from workhorse.config.base import ConfigError
from workhorse.data import Batch
from workhorse.nn import IGNORE
from workhorse.train import Recipe
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.transforms.adapters import add_adapter
from workhorse.transforms.lora import LoraConfig


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


def test_packed_sequences_have_the_loss_of_sequences_in_rows_of_their_own() -> None:
    """The masks of documents separate them, so also the probabilities are the same."""
    decoder, batch = model(), rows(2)
    lengths = (5, 3)
    places = [(row, slice(0, length)) for row, length in enumerate(lengths)]
    apart = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    for place in places:
        apart.targets[place] = batch.targets[place]
    tokens, targets = (
        torch.cat([one[place] for place in places])[None] for one in (batch.tokens, batch.targets)
    )
    documents = torch.tensor([[0] * 5 + [1] * 3])
    packed = Batch(tokens, targets, documents, batch.sources[:1])
    objective = NextTokenConfig(dft=True).build(decoder)
    assert objective.count(packed) == objective.count(apart)
    torch.testing.assert_close(objective(packed).loss, objective(apart).loss)
    mixed = replace(packed, documents=None)
    assert not torch.allclose(objective(mixed).loss, objective(apart).loss)


@pytest.mark.parametrize("head", [{}, {"tied": True, "bias": True, "multiplier": 0.5}])
def test_label_smoothing_is_that_of_pytorch(head: dict[str, object]) -> None:
    decoder, batch = model(head=head), rows()
    of_all = decoder(batch.tokens).flatten(0, 1), batch.targets.flatten()
    expected = F.cross_entropy(*of_all, ignore_index=IGNORE, label_smoothing=0.1)
    objective = NextTokenConfig(label_smoothing=0.1).build(decoder)
    assert_same(objective, batch, expected)
    plain = F.cross_entropy(*of_all, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(objective(batch).figures["loss"], plain.detach())


def test_label_smoothing_refuses_what_it_cannot_compute(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ConfigError, match="label_smoothing needs a head without cap; set"):
        NextTokenConfig(label_smoothing=0.1).build(model(head={"cap": 5.0}))
    adapted = add_adapter(model(), LoraConfig(targets=("head.proj",)))
    with pytest.raises(ConfigError, match="remove the head from adapter"):
        NextTokenConfig(label_smoothing=0.1).build(adapted)
    with pytest.raises(ConfigError, match="label_smoothing has no effect with dft=true"):
        NextTokenConfig(label_smoothing=0.1, dft=True)
    fields = make_recipe(objective={"kind": "next_token", "label_smoothing": 0.1}).to_dict()
    with pytest.raises(ConfigError, match="pipeline=2 divides the logits that label_smoothing="):
        Recipe.from_dict({**fields, "parallel": {"pipeline": 2}})
