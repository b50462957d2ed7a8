"""The interface of objectives, tested with a preference objective on pairs of sequences."""

import copy

import pytest
import torch
from torch import Tensor

from tests.train.preference import Preference, PreferenceConfig
from workhorse.config.base import Config, ConfigError, configs_in
from workhorse.config.errors import alternatives
from workhorse.data import Batch
from workhorse.memory.capacity import shares
from workhorse.nn import IGNORE, Decoder
from workhorse.optim.adamw import AdamWConfig
from workhorse.train import Recipe, TrainConfig
from workhorse.train.objectives.distill import DistillConfig
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.objectives.reward import RewardConfig
from workhorse.train.objectives.value_head import ValuesConfig
from workhorse.train.recipe.training import AnyObjective
from workhorse.train.step.build import build_step
from workhorse.train.step.step import TrainingStep

CPU = torch.device("cpu")


def pairs(n: int = 5) -> Batch:
    texts = torch.randint(11, (2 * n, 9), generator=torch.Generator().manual_seed(1))
    targets = texts[:, 1:].clone()
    targets[1, 5:] = IGNORE
    none = torch.zeros(2 * n, dtype=torch.int64)
    return Batch(texts[:, :-1], targets, None, none, group=torch.arange(n).repeat_interleave(2))


def config_of(**fields: object) -> TrainConfig:
    made = TrainConfig(steps=9, batch_size=10, seq_len=8, optimizer=AdamWConfig(), **fields)
    return made.model_copy(update={"objective": PreferenceConfig()})


def step_of(decoder: Decoder, rows: int = 10, **fields: object) -> TrainingStep:
    return build_step(decoder, config_of(micro_batch_size=rows, **fields), CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_preference_is_learned_by_the_step_that_knows_only_objectives(
    decoder: Decoder, dtype: str
) -> None:
    step = step_of(decoder, rows=4, dtype=dtype)
    assert step.backward(pairs())[1] == 5
    step.forget()
    step.objective.ends.clear()
    results = [step.update(*step.backward(pairs()), schedule=10.0) for _ in range(8)]
    assert results[0].loss == pytest.approx(0.69, abs=0.1)
    assert results[-1].loss < 0.5
    assert set(results[0].terms) == {"margin", "accuracy"}
    assert results[-1].terms["accuracy"] == 1
    assert results[-1].terms["margin"] > 0.5
    assert step.objective.ends == [True] * 8


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_its_gradient_does_not_depend_on_the_micro_batches(decoder: Decoder, rows: int) -> None:
    """Five pairs: the last micro-batch is smaller, and each of its pairs has the same weight."""
    found: list[list[Tensor]] = []
    for size in (10, rows):
        decoder.zero_grad()
        step = TrainingStep(
            Preference(decoder),
            (built := step_of(copy.deepcopy(decoder))).optimizer,
            CPU,
            precision=built.precision,
            scale=built.scale,
            micro_batch_size=size,
            grad_clip=1.0,
        )
        loss, counted = step.backward(pairs())
        assert counted == 5
        found.append([loss, *(weight.grad for weight in decoder.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)


def test_a_frozen_model_beside_the_trained_one_is_neither_trained_nor_moved(
    decoder: Decoder,
) -> None:
    """DPO: if both models are equal, the loss is log 2 per pair and the gradient is not zero."""
    frozen = copy.deepcopy(decoder).requires_grad_(False)
    before = {name: weight.clone() for name, weight in frozen.named_parameters()}
    objective = Preference(decoder, reference=frozen)
    assert set(objective.trainable()) == {name for name, _ in decoder.named_parameters()}
    loss, count, _ = objective(pairs())
    assert loss.item() / count == pytest.approx(0.6931, abs=1e-4)
    loss.backward()
    assert all(weight.grad is not None for weight in decoder.parameters())
    for name, weight in frozen.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


def test_what_an_objective_has_beside_the_decoder_is_trained_too(decoder: Decoder) -> None:
    class WithHead(NextToken):
        def __init__(self, decoder: Decoder) -> None:
            super().__init__(decoder)
            self.value = torch.nn.Linear(16, 1)

        def forward(self, batch):
            outcome = super().forward(batch)
            x = self.decoder.hidden(batch.tokens)
            return outcome._replace(loss=outcome.loss + self.value(x).square().sum())

    class Config(PreferenceConfig):
        def build(self, decoder, team=None):
            return WithHead(decoder)

    config = config_of().model_copy(update={"objective": Config()})
    step = build_step(decoder, config, CPU)
    assert {"value.weight", "value.bias"} < set(step.objective.trainable())
    before = step.objective.value.weight.clone()
    step.update(*step.backward(pairs()), schedule=1.0)
    assert not torch.equal(step.objective.value.weight, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_of_the_type_of_the_trained_ones(decoder: Decoder, dtype: str) -> None:
    """Frozen weights get the training dtype and no optimizer memory, as for an adapter."""
    for name, weight in decoder.named_parameters():
        weight.requires_grad_("attention" in name)
    before = {name: weight.clone() for name, weight in decoder.named_parameters()}
    step = step_of(decoder, dtype=dtype)
    assert {weight.dtype for weight in decoder.parameters()} == {getattr(torch, dtype)}
    step.update(*step.backward(pairs()), schedule=1.0)
    kept = step.optimizer.masters.weights(decoder)
    assert {weight.dtype for weight in kept.values()} == {torch.float32}
    for name, weight in kept.items():
        trained = "attention" in name
        rounded = before[name].to(getattr(torch, dtype)).float()
        assert torch.equal(weight, before[name] if trained else rounded) is not trained
        assert any(held.startswith(name) for held in step.optimizer.tensors()) is trained


def test_weights_of_targets_are_their_share_of_loss_and_denominator(decoder: Decoder) -> None:
    batch = pairs()
    twice = torch.ones(batch.targets.shape)
    twice[0] = 2
    objective = NextToken(decoder)
    weighted = Batch(*batch.tensors[:2], None, batch.sources, weights=twice)
    rows = [*range(10), 0]
    repeated = Batch(batch.tokens[rows], batch.targets[rows], None, batch.sources[rows])
    found, expected = objective(weighted), objective(repeated)
    assert objective.count(weighted) == objective.count(repeated) == found.count == expected.count
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("config", [*configs_in(AnyObjective), ValuesConfig])
def test_numbers_that_can_exceed_float32_are_refused(config: type[Config]) -> None:
    needed = {DistillConfig: {"teacher": "x"}, RewardConfig: {"token": 0}}
    fields = needed.get(config, {})
    config.from_dict(fields)
    for name, field in config.model_fields.items():
        if float in alternatives(field.annotation):
            with pytest.raises(ConfigError, match=name):
                config.from_dict({**fields, name: 1e39})


def test_groups_are_never_divided(make_recipe) -> None:
    assert shares(10, together=2) == [10, 6, 4, 2]
    fields = make_recipe().to_dict()
    TrainConfig.model_rebuild()
    with pytest.raises(ConfigError, match="batch_size=9 splits groups of 2 rows"):
        _fits(batch_size=9)
    with pytest.raises(ConfigError, match="micro_batch_size=3 splits groups of 2 rows"):
        _fits(batch_size=12, micro_batch_size=3)
    assert Recipe.from_dict(fields).train.objective.rows_together == 1
    fields["train"] |= {"objective": {"kind": "dpo"}, "batch_size": 16}
    fields["parallel"] = {"reduction": "exact"}
    assert Recipe.from_dict(fields).parallel.parts == 8
    fields["train"]["batch_size"] = 12  # parts of 1 and of 2 rows
    with pytest.raises(ConfigError, match=r"in 8 parts, .*; choose a multiple of 16"):
        Recipe.from_dict(fields)
    fields["parallel"] = {"pipeline": 2}  # micro-batches of 1 row
    with pytest.raises(ConfigError, match=r"micro-batches of 1, .*; set micro_batch_size"):
        Recipe.from_dict(fields)
    fields["train"]["micro_batch_size"] = 2
    assert Recipe.from_dict(fields).train.micro_batch_size == 2


def _fits(**fields: int) -> None:
    made = TrainConfig(steps=1, seq_len=8, **fields)
    made.model_copy(update={"objective": PreferenceConfig()})._fits_together()


def test_an_objective_without_what_it_needs_is_refused() -> None:
    plain = Batch(*pairs().tensors[:2], None, torch.zeros(10))
    with pytest.raises(ConfigError, match="objective preference needs pairs, which this data"):
        config_of().objective.check_rows(plain)
    config_of().objective.check_rows(pairs())


def test_a_recipe_of_before_names_its_z_loss_where_it_stood(make_recipe) -> None:
    recipe = make_recipe(z_loss=0.5)
    assert recipe.train.objective.z_loss == 0.5
    assert "z_loss" not in recipe.to_dict()["train"]
