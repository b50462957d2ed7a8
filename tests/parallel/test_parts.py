"""`workhorse train` with a divided model equals the run of one process up to rounding."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from tests.nn.grid import COVERING
from tests.parallel import forked
from tests.parallel.runs import GATED, fields, steps_of
from tests.parallel.teams import DOCUMENTS, check_parts
from workhorse.checkpoints import RunDirectory
from workhorse.config.base import ConfigError
from workhorse.parallel.config import DIVIDED, ParallelismConfig
from workhorse.parallel.division.teams import part_of_model
from workhorse.run import train
from workhorse.train import Recipe, read_metrics


@pytest.mark.parametrize("first", [0, 3])
def test_two_processes_pass_as_one(tmp_path: Path, first: int) -> None:
    """Runs a part of the grid, alternately with and without documents; a campaign runs all."""
    meshes = [ParallelismConfig(tensor=2), ParallelismConfig(pipeline=2)]
    check_parts(tmp_path, meshes, COVERING[first::6], [[None], [DOCUMENTS]])


def test_a_run_goes_on_with_other_parts_of_the_model(tmp_path: Path) -> None:
    """Muon gathers its matrices, key heads are copied, and the norms of heads are divided."""
    recipe = fields(
        tmp_path,
        GATED,
        steps=8,
        batch_size=8,
        optimizer={"kind": "muon"},
        eval_every=2,
        samples={"prompts": ["1 times"], "every": 2, "max_new_tokens": 9},
    )
    recipe["model"]["blocks"]["main"] |= {
        "dropout": 0.0,
        "attention": {
            **{"n_heads": 4, "n_kv_heads": 1, "position": "rope", "qkv_bias": True},
            **{"out_bias": True, "qk_norm": {"norm": "rms_norm", "over": "each_head"}},
        },
    }
    recipe["parallel"] = {}
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file, walk = tmp_path / "tiny.yaml", tmp_path / "walk"
    file.write_text(yaml.safe_dump(recipe))
    pairs = {"tensor": 2, "shard": 2}, {"tensor": 2, "pipeline": 2}
    for number, divided in enumerate(({"tensor": 2}, *pairs, {"pipeline": 2})):
        words = [str(file), f"train.steps={2 + 2 * number}", "--out", str(walk)]
        words += [f"parallel.{name}={divided.get(name, 1)}" for name in DIVIDED]
        words += ["--resume"] if walk.exists() else []
        forked.train(words, math.prod(divided.values()), tmp_path / "said")
    for one, other in zip(*(steps_of(tmp_path / name) for name in ("one", "walk")), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    weights = [RunDirectory(tmp_path / name).store().newest().model for name in ("one", "walk")]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=2e-4, rtol=0)
    assert told_by(tmp_path / "one") == told_by(tmp_path / "walk")


def told_by(run: Path) -> dict[str, str]:
    """Samples by step, and the number of parameters."""
    events = list(read_metrics(run / "metrics.jsonl"))
    samples = {str(one["step"]): str(one["samples"]) for one in events if one["kind"] == "samples"}
    (parameters,) = {str(one["parameters"]) for one in events if one["kind"] == "start"}
    return samples | {"parameters": parameters}


def test_fewer_tokens_than_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor=99 is more than vocab_size=.*; choose at most"):
        part_of_model(COVERING[0], 99)
