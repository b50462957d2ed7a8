"""The estimates of a dry run, and the errors that it shares with training."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_balance import MIXED, recipe_of
from workhorse.data import Batch
from workhorse.errors import WorkhorseError
from workhorse.plan import plan
from workhorse.run import estimate, train
from workhorse.train import Recipe, with_init
from workhorse.train.step.build import build_step

SPECIAL = {"bos": None, "eos": None, "pad": None, "chat": []}


def changed(recipe: Recipe, section: str, **fields: Any) -> Recipe:
    settings = recipe.to_dict()
    kept = {} if "kind" in fields else settings[section]
    return Recipe.from_dict({**settings, section: {**kept, **fields}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train", {"dtype": "float16"}), "dtype=float16 needs CUDA, but"),
        (("train", {"kernel": "flex"}), "kernel=flex has no backward on a CPU"),
        (("train", {"fp8": True}), "train.fp8=true needs CUDA"),
        (("train", {"device": "cuda:7"}), "device=cuda:7 is not available"),
        (("train", {"trackers": ["wandb"]}), "the tracker wandb is not installed"),
        (("train", {"seq_len": 10**6}), "fewer than one window of seq_len"),
        (
            ("data", {"corpus": {"kind": "folder", "path": "nowhere"}}),
            "the folder nowhere in .* does not exist",
        ),
        (
            ("data", {"corpus": {"kind": "text", "path": "nothing"}}),
            "the file nothing in .* does not exist",
        ),
        (("data", {"bos": True}), "the tokenizer has no bos token"),
        (("tokenizer", {"special": SPECIAL}), "the tokenizer has no eos token"),
        (("tokenizer", {"kind": "file", "path": "nowhere"}), "nowhere"),
    ],
)
def test_a_dry_run_refuses_what_training_refuses(
    make_recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = changed(make_recipe(), change[0], **change[1])
    said = []
    for attempt in (lambda: estimate(recipe), lambda: train(recipe, tmp_path / "run")):
        with pytest.raises(WorkhorseError, match=message) as caught:
            attempt()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not (tmp_path / "run").exists()


def test_an_empty_sample_where_nothing_begins_a_text_is_refused(
    make_recipe, tmp_path: Path
) -> None:
    recipe = changed(make_recipe(samples={"every": 1}), "data", eos=False)
    for attempt in (lambda: estimate(recipe), lambda: train(recipe, tmp_path / "run")):
        with pytest.raises(WorkhorseError, match="empty prompt, but training puts neither"):
            attempt()
    assert not (tmp_path / "run").exists()


def test_a_dry_run_knows_whether_weights_to_start_from_fit(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(steps=2), tmp_path / "first")
    fields = make_recipe().to_dict() | {"init": str(tmp_path / "first"), "model": {}}
    assert estimate(Recipe.from_dict(with_init(fields)))["parameters"]["total"] > 0
    fields["model"] = {"n_layers": 3}
    with pytest.raises(
        WorkhorseError, match=r"fit: model\.n_layers is 3 in the recipe and 2 in init; remove"
    ):
        estimate(Recipe.from_dict(with_init(fields)))


def held(step: Any) -> int:
    """Return the bytes of all gradients and sums of gradients."""
    masters = step.optimizer.masters
    parameters = masters.parameters.values()
    tensors = [*masters.sums.values(), *(p.grad for p in parameters if p.grad is not None)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [None, 2])
def test_the_memory_of_a_dry_run_is_what_a_step_holds(
    make_recipe, monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int | None
) -> None:
    """The bytes of weights and optimizer are exact, and the peak includes gradients and sums."""
    recipe = recipe_of(make_recipe, MIXED, dtype=dtype, micro_batch_size=rows, device="cpu")
    estimated = estimate(recipe)
    told = {name: sum(sizes.values()) for name, sizes in estimated["memory"]["held"].items()}
    tokens = torch.randint(257, (4, 16))
    batch = Batch(tokens, tokens, None, torch.zeros(4, dtype=torch.int64))
    decoder = recipe.decoder_config(257).build()
    step = build_step(decoder, recipe.train, torch.device("cpu"))
    most = []
    masters = step.optimizer.masters
    accumulate = masters.accumulate
    monkeypatch.setattr(masters, "accumulate", lambda: (most.append(held(step)), accumulate()))
    loss, counted = step.backward(batch)
    most.append(held(step))
    step.update(loss, counted, schedule=1.0)
    kept = [*step.optimizer.tensors().values(), *masters.low_bits.values()]
    assert told["weights"] == sum(t.nbytes for t in (*decoder.parameters(), *decoder.buffers()))
    assert told["optimizer"] + told.get("low_bits", 0) == sum(t.nbytes for t in kept)
    assert estimated["memory"]["peak"]["total"] >= sum(told.values()) + max(most)
    assert estimated["micro_batch_size"] == (rows or 4)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_dry_run_has_the_account_of_a_plan(make_recipe, tmp_path: Path, packing: str) -> None:
    recipe = make_recipe(micro_batch_size="auto", device="cpu")
    recipe = changed(recipe, "data", packing=packing)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    planned = plan(file)
    told = estimate(recipe)
    for name in ("held", "parts", "activations", "peak"):
        assert told["memory"][name] == planned["memory"][name]
    assert told["micro_batch_size"] == planned["train"]["micro_batch_size"] == 4


def test_what_does_not_fit_is_told_and_not_timed(
    make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("workhorse.run.dry_run")  # `train` has a function of its name
    monkeypatch.setattr(module, "available", lambda device: 2**16)
    told = estimate(make_recipe())
    assert told["memory"]["fits"] is False
    assert told["seconds_from"] == "matrix product"


def test_active_parameters_are_told(make_recipe) -> None:
    parameters = estimate(recipe_of(make_recipe, MIXED))["parameters"]
    resting = 2 * 6 * (3 * 8 * 16 + 8 + 8 + 16)  # layers, experts, their matrices and biases
    assert parameters["active"] == parameters["total"] - resting
    dense = estimate(make_recipe())["parameters"]
    assert dense["active"] == dense["total"]
