"""`workhorse train --dry-run`: reports on a run without starting it."""

import json
from pathlib import Path

import pytest

from tests.cli.tiny import SMALL_GPT2
from workhorse.checkpoints import RunDirectory
from workhorse.cli.main import main
from workhorse.config.base import read_yaml
from workhorse.nn import DecoderConfig
from workhorse.train import Recipe, override_recipe

pytestmark = pytest.mark.usefixtures("recipe")


def test_dry_run_says_what_a_resume_would_change_and_writes_nothing(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--out", "run"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    capsys.readouterr()
    arguments = ["train", "run", "train.steps=9", "train.batch_size=3", "--resume", "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["step"] == 6
    assert found["changes"] == [
        "train.steps changes from 6 to 9",
        "train.batch_size changes from 2 to 3",
    ]
    assert "run: would resume after step 6" in said.err
    assert main(arguments) == 0
    assert " left on cpu, " in capsys.readouterr().out
    assert main([*arguments, "train.seed=4"]) == 2
    assert main(["train", recipe, "--out", "run", "--dry-run"]) == 2
    assert main(["train", recipe, "--out", "new", "--dry-run"]) == 0
    assert "new: would start a new run" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert not Path("new").exists()


def test_dry_run_tells_and_writes_nothing(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    assert main(["train", recipe, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(Path().iterdir()) == before
    # Attention 4 · 16², feed-forward 2 · 16 · 32, each with one norm of 16, and the embedding.
    hidden, vectors, embedding = 4 * 16**2 + 2 * 16 * 32, 2 * 16, 257 * 16
    total = hidden + vectors + embedding
    assert found["parameters"]["total"] == total
    memory = found["memory"]
    held = {kind: sum(sizes.values()) for kind, sizes in memory["held"].items()}
    assert held["weights"] == 4 * total
    # Muon stores one value per hidden weight; AdamW two per other weight and a count per tensor.
    assert held["optimizer"] == 4 * (hidden + 2 * (vectors + embedding) + 3)
    assert found["tokens"] == 6 * 2 * 16
    assert found["seconds_from"] == "steps"
    assert main(["train", recipe, "--dry-run"]) == 0
    account = capsys.readouterr().out
    assert account.startswith(f"parameters  {total:,}")
    peak = memory["peak"]
    where = f"at its peak, in the {peak['phase']} pass, at {peak['part']}, 2 rows at once"
    assert where in account.splitlines()[1]
    assert main(["train", recipe, "--dry-run", "--show-recipe"]) == 0
    settings, shown = capsys.readouterr().out.split("\n\n")
    assert "grad_clip: 1.0" in settings
    assert shown.splitlines()[:2] == [f"# {line}" for line in account.splitlines()[:2]]


@pytest.mark.parametrize("model", ["model.final_norm={kind: rms_norm}", SMALL_GPT2])
def test_the_recipe_shown_is_a_recipe_of_the_same_model(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, model, "--dry-run", "--show-recipe"]) == 0
    Path("shown.yaml").write_text(capsys.readouterr().out)
    shown = read_yaml("shown.yaml")
    whole = set(DecoderConfig.model_fields) - {"vocab_size"}  # set by the tokenizer
    assert set(shown["model"]) == whole
    as_written = Recipe.from_dict(override_recipe(read_yaml(recipe), [model], print))
    assert Recipe.from_dict(shown).decoder_config(257) == as_written.decoder_config(257)
    assert main(["train", recipe, f"{model}", "model.vocab_size=300", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["model"]["vocab_size"] == 300


def test_a_preset_trained_on_less_than_its_context_is_told(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "preset gpt2 has a context of 1,024 tokens, but is trained only on sequences of"
    remedy = "unless you set model.max_seq_len=16\n"
    for arguments in (["--dry-run"], [], ["--dry-run"]):  # the last one finds an existing run
        assert main(["train", recipe, SMALL_GPT2, *arguments]) == 0
        said = capsys.readouterr().err
        assert said.count(line) == 1
        assert remedy in said
    assert main(["train", recipe, SMALL_GPT2, "model.max_seq_len=16", "--out", "set"]) == 0
    assert main(["train", "runs/tiny", "train.steps=7", "--resume"]) == 0
    assert main(["train", recipe, "--out", "without-preset"]) == 0
    assert "has a context of" not in capsys.readouterr().err
    assert RunDirectory("without-preset").config.max_seq_len == 16


def test_dry_run_tells_where_the_folder_of_the_recipes_name_is_taken(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--dry-run"]) == 0
    assert ": would start a new run\n" in capsys.readouterr().err
    assert main(["train", recipe]) == 0
    capsys.readouterr()
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "already contains a run; resume it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["to-nothing", "corpus.txt", "corpus.txt/run"])
def test_dry_run_refuses_the_place_that_training_would(
    recipe: str, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("to-nothing").symlink_to("nowhere")
    said = []
    for arguments in ([], ["--dry-run"]):
        assert main(["train", recipe, "--out", out, *arguments]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert said[0].startswith(f"workhorse: cannot write in the run directory {out}: ")
