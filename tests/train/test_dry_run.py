"""Dry runs: the plan of a run and the resources it needs."""

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.runs import GATED, fields
from workhorse.memory.device_memory import device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.run import dry_run, estimate, recipe_warnings, train
from workhorse.train import Recipe

FIGURES = ("parameters", "micro_batch_size", "tokens", "exports_as")


def test_a_dry_run_has_the_figures_and_where_the_run_would_stand(
    make_recipe, tmp_path: Path
) -> None:
    recipe, said = make_recipe(steps=3), []
    found = dry_run(recipe, tmp_path / "run", notify=said.append)
    assert {name: found[name] for name in FIGURES} == {
        name: estimate(recipe)[name] for name in FIGURES
    }
    assert (found["run_directory"], found["step"], found["changes"]) == (tmp_path / "run", 0, [])
    chosen, free = said
    assert chosen.startswith("train.optimizer is not set: using muon (learning_rate=0.001 for the")
    assert free == f"{tmp_path / 'run'}: would start a new run"
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_refused_where_given_and_else_told(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, said = make_recipe(steps=1), []
    folder = Path("runs") / recipe.name
    train(recipe, folder)
    with pytest.raises(ValueError, match="already contains a run"):
        dry_run(recipe, folder)
    assert "run_directory" not in dry_run(recipe, notify=said.append)
    assert said[0].startswith(f"{folder} already contains a run")
    assert dry_run(make_recipe(steps=2), folder, resume=True)["step"] == 1


def test_the_time_is_that_of_the_steps_that_are_left(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("workhorse.run.dry_run")
    monkeypatch.setattr(module, "time_steps", lambda *_, **__: 1.5)
    train(make_recipe(steps=1), tmp_path / "run")
    for steps, left in ((1, 0.0), (3, 3.0)):
        found = dry_run(make_recipe(steps=steps), tmp_path / "run", resume=True)
        assert found["seconds"] == left
    assert dry_run(make_recipe(steps=3), tmp_path / "other")["seconds"] == 4.5


def test_each_of_several_processes_has_its_share_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process needs the memory that `plan` computes, and all share this machine's free memory."""
    written = fields(tmp_path, GATED, batch_size=8)
    one = estimate(Recipe.from_dict({**written, "parallel": {}}))
    divided = Recipe.from_dict({**written, "parallel": {"shard": 2, "data": 2}})
    module = importlib.import_module("workhorse.run.dry_run")
    monkeypatch.setattr(module, "available", lambda _: 1000)
    found = estimate(divided)
    config = divided.decoder_config(257)
    own = device_memory(PlannedStep.of_recipe(divided, config, torch.device("cpu")))
    assert (one["processes"], found["processes"]) == (1, 4)
    assert found["memory"]["peak"]["total"] == own.total < one["memory"]["peak"]["total"]
    assert (found["memory"]["room"], found["memory"]["fits"]) == (250, False)
    said: list[str] = []
    dry_run(divided, tmp_path / "run", notify=said.append)
    assert "needs 4 processes; start them with --workers 4 or torchrun" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"final_norm": None}, ["the model has no norm after its last layer; set"]),
        ({"final_norm": {"kind": "none"}}, []),
        ({"position": None}, ["the model has no position encoding: only the causal mask"]),
        ({"position": {"kind": "none"}}, []),
        ({"preset": "gpt2"}, ["preset gpt2 keeps its learned positions in addition to rope; set"]),
        ({"preset": "gpt2", "embedding": {"position": {"kind": "none"}}}, []),
    ],
)
def test_parts_that_were_not_asked_for_are_said(
    changes: dict[str, Any], said: list[str], make_recipe
) -> None:
    recipe = make_recipe(optimizer={"kind": "muon"})
    model = deepcopy(dict(recipe.model)) | {"max_seq_len": 16} | changes
    if "position" in changes:
        attention = model["blocks"]["main"]["attention"]
        del attention["position"]
        attention |= {"position": position} if (position := model.pop("position")) else {}
    if "preset" in changes:
        model["blocks"] = {"main": {"attention": {"n_heads": 2, "position": {"kind": "rope"}}}}
    model = {key: value for key, value in model.items() if value is not None}
    remarks = recipe_warnings(recipe.model_copy(update={"model": model}))
    assert len(remarks) == len(said)
    assert all(map(str.startswith, remarks, said))
