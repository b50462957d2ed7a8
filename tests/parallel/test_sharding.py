"""`workhorse train` with sharded weights is bitwise identical to the run of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.parallel import forked
from tests.parallel.runs import MIXTURE, fields, state_of, steps_of
from workhorse.checkpoints import RunDirectory
from workhorse.errors import WorkhorseError
from workhorse.parallel.config import ParallelismConfig
from workhorse.run import train
from workhorse.train import Recipe, read_metrics


def divisible(folder: Path, feed_forward: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A recipe for 1, 2, 3, 4, 6 or 12 processes that run in lockstep."""
    recipe = fields(folder, feed_forward, **{"batch_size": 12, **settings})
    return {**recipe, "parallel": {"reduction": {"kind": "exact", "logical_shards": 12}}}


def test_any_division_of_the_weights_gives_the_same_bits(tmp_path: Path) -> None:
    """Runs on one process, on three (one without an expert), and on two pairs (`reshard: step`)."""
    recipe = divisible(
        tmp_path,
        MIXTURE,
        dtype="bfloat16",
        batch_size=24,
        micro_batch_size=1,  # half a part
        optimizer={"kind": "muon", "learning_rate": 3e-3},
        **{"balance_rate": 0.001, "balance_loss": 0.01, "eval_every": 2},
        samples={"prompts": ["1 times"], "every": 2, "max_new_tokens": 9},
    )
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    walk = tmp_path / "walk"
    legs = (3, 3, ["parallel.shard=3"]), (6, 4, ["parallel.shard=2", "parallel.reshard=step"])
    for steps, workers, division in legs:
        more = ["--resume"] if walk.exists() else []
        words = [str(file), f"train.steps={steps}", *division, "--out", str(walk), *more]
        said = forked.train(words, workers, tmp_path / "said")
        assert "rounded differently" not in said
    assert state_of(walk) == state_of(tmp_path / "one")
    decoded = samples_of(walk)  # with gathered weights, and once more where the first leg ended
    assert {**decoded, **samples_of(tmp_path / "one")} == decoded


def samples_of(folder: Path) -> dict[int, Any]:
    """The samples of a run, by step."""
    events = read_metrics(folder / "metrics.jsonl")
    return {event["step"]: event["samples"] for event in events if event["kind"] == "samples"}


def test_the_fast_reduction_differs_by_rounding_alone(tmp_path: Path) -> None:
    """Four ranks shard weights; two by two they divide rows, sequences and experts.

    In its first steps AdamW amplifies rounding errors of small gradients.
    """
    adamw = {"kind": "adamw"}
    recipe = divisible(tmp_path, MIXTURE, optimizer=adamw, balance_loss=0.01, eval_every=3)
    recipe["parallel"] = {}
    recipe["model"]["blocks"]["main"]["dropout"] = 0.0
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    divided = ["parallel.shard=2", "parallel.context=2", "parallel.expert=2"]
    forked.train([str(file), *divided, "--out", str(tmp_path / "many")], 4, tmp_path / "said")
    for one, other in zip(*(steps_of(tmp_path / name) for name in ("one", "many")), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        bound = 1e-6 if one["step"] == 1 else 1e-4
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    weights = [RunDirectory(tmp_path / name).store().newest().model for name in ("one", "many")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-4, rtol=0)


def test_workers_that_the_division_does_not_divide_are_refused() -> None:
    said = "shard=2 does not divide 3 processes; choose divisors of 3"
    with pytest.raises(WorkhorseError, match=said):
        ParallelismConfig(shard=2).on(3)
