"""The dial: built-in recipes from a single number, the depth."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn

from workhorse.cli.main import main
from workhorse.compare import read_study
from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError
from workhorse.models.describe import flops_per_token
from workhorse.run.dry_run import vocab_size_of
from workhorse.train import Recipe
from workhorse.train.recipe.depth import DEEPEST, read_recipe, recipe_of_depth

ROOT = Path(__file__).parents[3]


def sizes(depth: int) -> dict[str, float]:
    recipe = Recipe.from_dict(recipe_of_depth(depth))
    train, config = recipe.train, recipe.decoder_config(vocab_size_of(recipe))
    return {
        "width": config.d_model,
        "feed-forward": recipe.model["blocks"]["main"]["feed_forward"]["d_ff"],
        "vocabulary": config.vocab_size,
        "context": train.seq_len,
        "tokens of a step": train.tokens_per_step,
        "tokens": train.steps * train.tokens_per_step,
        "slowness": 1 / train.optimizer.to_dict()["adamw"]["learning_rate"],
    }


def sizes_of_model(depth: int) -> dict[str, float]:
    recipe = Recipe.from_dict(recipe_of_depth(depth))
    train, config = recipe.train, recipe.decoder_config(vocab_size_of(recipe))
    decoder = config.build(device="meta")
    return {
        "parameters": sum(weight.numel() for weight in decoder.parameters()),
        "parameters that multiply": sum(
            part.weight.numel() for part in decoder.modules() if isinstance(part, nn.Linear)
        ),
        "flops": flops_per_token(decoder, train.seq_len) * train.steps * train.tokens_per_step,
    }


def test_a_deeper_recipe_is_larger_in_everything():
    for smaller, larger in pairwise(map(sizes, range(1, DEEPEST + 1))):
        assert all(smaller[name] <= larger[name] for name in smaller)
        for name in ("width", "tokens"):
            assert smaller[name] < larger[name]
    depths = [*range(1, 13), *range(16, DEEPEST + 1, 8)]
    for smaller, larger in pairwise(map(sizes_of_model, depths)):
        assert all(smaller[name] < larger[name] for name in smaller)


@pytest.mark.parametrize("depth", [0, DEEPEST + 1])
def test_a_depth_beyond_the_dial(depth: int):
    with pytest.raises(WorkhorseError, match=f"choose depth-1 to depth-{DEEPEST}"):
        recipe_of_depth(depth)


@pytest.mark.parametrize("name", ["depth8", "depth_8", "depth=8", "depth 8"])
def test_a_name_that_is_nearly_of_the_dial(name: str):
    with pytest.raises(WorkhorseError, match=r"is not a file; did you mean the recipe depth-8\?"):
        read_recipe(name)


def test_every_verb_that_takes_a_recipe_takes_a_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in "abcdefghijkl":
        Path(f"texts/{name}.txt").write_text(f"line {name} after another\n" * 40)
    small = [
        *("data.corpus={kind: folder, path: texts}", "tokenizer.vocab_size=270"),
        *("train.steps=2", "train.batch_size=2", "train.seq_len=16"),
    ]
    assert main(["train", "depth-1", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert json.loads(Path("runs/depth-1/config.json").read_text())["n_layers"] == 1
    assert main(["data", "inspect", "depth-1", *small]) == 0
    assert main(["plan", "depth-1", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "recipe"
    Path("study.yaml").write_text(
        "{name: s, base: depth-2, budget: {steps: 1}, seeds: [1, 2],"
        " grid: {train.batch_size: [1, 2]}}"
    )
    assert read_study("study.yaml").base == recipe_of_depth(2)
    assert main(["train", "depth-65"]) == 2
    assert "choose depth-1 to depth-64" in capsys.readouterr().err


def test_the_demo_is_a_notch():
    demo = Recipe.from_dict(read_yaml(ROOT / "recipes" / "stdlib-small.yaml"))
    notch = Recipe.from_dict(read_recipe("depth-2"))
    assert demo.model == notch.model
    assert (demo.tokenizer, demo.data) == (notch.tokenizer, notch.data)
    own, its = demo.train.to_dict(), notch.train.to_dict()
    differ = {key for key in own | its if own.get(key) != its.get(key)}
    assert differ == {"seed", "eval_every", "eval_batches", "samples"}


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("depth-3").write_text("name: mine\n")
    assert read_recipe("depth-3") == {"name": "mine"}


def test_the_table_of_the_documentation():
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) "
        r"\| ([\d.]+) ([MB]) \|$",
        text,
        re.MULTILINE,
    )
    assert len(rows) == 6
    for *row, size, unit in rows:
        depth, *figures = (int(cell.replace(",", "")) for cell in row)
        found = sizes(depth) | sizes_of_model(depth)
        names = ("width", "feed-forward", "vocabulary", "context", "tokens of a step")
        assert figures == [found[name] for name in names]
        multiply = found["parameters that multiply"]
        assert f"{multiply:,} parameters in matmuls" in recipe_of_depth(depth)["description"]
        decimals = len(size.partition(".")[2])
        assert f"{multiply / {'M': 1e6, 'B': 1e9}[unit]:.{decimals}f}" == size
