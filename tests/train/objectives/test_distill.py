"""Distillation against the divergences of GKD (2306.13649 §3), in float64."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import workhorse
from tests.native.machine import OPERATORS
from tests.train.conftest import MakeRecipe
from tests.train.objectives.data import SEQ, assert_same, model, rows
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.nn import IGNORE
from workhorse.optim.adamw import AdamWConfig
from workhorse.run import train
from workhorse.train import Recipe, TrainConfig
from workhorse.train.objectives.distill import Distill, DistillConfig
from workhorse.train.step.build import build_step


def kl(of: Tensor, to: Tensor) -> Tensor:
    return (of * (of / to).log()).sum(dim=-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("max_logits", [None, 70])
def test_the_divergences_are_those_of_the_paper(beta: float, max_logits: int | None) -> None:
    """The same if the logits of only three positions are computed at a time."""
    student, teacher = model(0), model(1, d_model=24)
    batch = replace(rows(), weights=torch.rand(8, 8, generator=torch.Generator().manual_seed(1)))
    p, q = (decoder(batch.tokens).softmax(-1) for decoder in (teacher, student))
    mixture = beta * p + (1 - beta) * q
    between = beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    each = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, between)
    weights = batch.weights * (batch.targets != IGNORE)
    objective = Distill(student, teacher, beta)
    objective.logprobs.max_logits = max_logits
    assert_same(objective, batch, (each * weights).sum() / weights.sum())


def test_the_teacher_is_neither_trained_nor_saved_and_the_model_approaches_it() -> None:
    student, teacher = model(0).float(), model(1).float()
    before = copy.deepcopy(teacher.state_dict())
    objective = Distill(student, teacher)
    assert set(objective.trainable()) == {name for name, _ in student.named_parameters()}
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss, count, _ = objective(rows())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / count.item())
    assert losses[-1] < losses[0] / 2
    for name, weight in teacher.state_dict().items():
        assert torch.equal(weight, before[name])
    assert Distill(copy.deepcopy(teacher), teacher)(rows()).loss.abs() < 1e-4


def test_a_recipe_names_the_teacher_in_a_folder(tmp_path: Path, make_recipe) -> None:
    teacher = model(1, vocab_size=13).float()
    workhorse.save(teacher, tmp_path / "teacher")
    config = DistillConfig(teacher=str(tmp_path / "teacher"), beta=0.5)
    student = model(0, vocab_size=13).float()
    config_of_run = TrainConfig(
        steps=1, batch_size=8, seq_len=SEQ, objective=config, optimizer=AdamWConfig()
    )
    found, counted = build_step(student, config_of_run, torch.device("cpu")).backward(rows())
    torch.testing.assert_close(found, Distill(student, teacher, 0.5)(rows()).loss / counted)
    memory = step_memory(PlannedStep(student.config, config_of_run, torch.device("cpu")))
    size = sum(weight.nbytes for weight in teacher.parameters())
    assert memory.held["teacher"] == {("teacher", "teacher"): size}
    assert {*memory.timeline["teacher"]} == {size}
    with pytest.raises(ConfigError, match=r"has vocab_size=\d+, but the model has 11; choose"):
        config.build(model())
    with pytest.raises(ConfigError, match=r"train\.objective\.teacher"):
        DistillConfig(teacher=str(tmp_path / "none")).build(model())
    fields = make_recipe(objective=config.to_dict()).to_dict()
    with pytest.raises(
        ConfigError, match="tensor=2 divides the logits that objective=distill needs"
    ):
        Recipe.from_dict({**fields, "parallel": {"tensor": 2}})


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    """Vocabularies of equal size are not enough."""
    fields = make_recipe(steps=1, eval_every=None).to_dict()
    other = {"kind": "bytes", "special": {"bos": "<|begin|>"}}
    train(Recipe.from_dict({**fields, "tokenizer": other}), tmp_path / "teacher")
    fields["train"]["objective"] = {"kind": "distill", "teacher": str(tmp_path / "teacher")}
    line = r"token 256 is '<.begin.>' for teacher=.*; choose a teacher with the same tokenizer"
    with pytest.raises(WorkhorseError, match=line):
        train(Recipe.from_dict(fields), tmp_path / "student")
    assert not (tmp_path / "student").exists()


def test_a_run_resumes_only_with_its_teacher(tmp_path: Path, make_recipe: MakeRecipe) -> None:
    fields = make_recipe(steps=1, eval_every=None).to_dict()
    for seed in (0, 1):
        fields["train"]["seed"] = seed
        train(Recipe.from_dict(fields), tmp_path / str(seed))
    shutil.copytree(tmp_path / "0", tmp_path / "teacher")
    fields["train"]["objective"] = {"kind": "distill", "teacher": str(tmp_path / "teacher")}
    train(Recipe.from_dict(fields), tmp_path / "run")
    fields["train"]["steps"] = 2
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(tmp_path / "1", tmp_path / "teacher")
    with pytest.raises(WorkhorseError, match="the teacher differs from the one that the checkpoi"):
        train(Recipe.from_dict(fields), tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(tmp_path / "0", tmp_path / "teacher")
    assert train(Recipe.from_dict(fields), tmp_path / "run", resume=True).step == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_teacher_of_a_step_uses_native_operators(dtype: str, tmp_path: Path) -> None:
    """Its weights stay the same, and get no gradients."""
    teacher, student = model(1, vocab_size=13).float(), model(0, vocab_size=13).float()
    workhorse.save(teacher, tmp_path / "teacher")
    objective = DistillConfig(teacher=str(tmp_path / "teacher"))
    plain = TrainConfig(
        steps=1, batch_size=8, seq_len=SEQ, objective=objective, dtype=dtype, execution="reference"
    )
    losses, kinds = [], []
    for config in (plain, plain.replace(execution="auto")):
        step = build_step(copy.deepcopy(student), config, torch.device("cpu"))
        losses.append(step.backward(rows())[0].item())
        (frozen,) = step.objective.frozen_models()
        kinds.append({type(one).__module__.split(".")[2] for one in frozen.layers.modules()})
        for name, weight in frozen.named_parameters():
            assert torch.equal(weight, teacher.get_parameter(name).to(weight.dtype))
            assert weight.grad is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "float32" else 0.02)
    assert "native_training" not in kinds[0]
    assert ("native_training" in kinds[1]) == (OPERATORS.training is not None)
