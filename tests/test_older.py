"""A run directory and a model saved by version 0.10.0 can still be loaded and resumed.

`older/` was written by `workhorse train` and `workhorse convert --to workhorse`, before settings
were renamed: its recipe has `train.z_loss`, `train.compile` and `train.jumps`.
"""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

import workhorse
from workhorse.train import Recipe, override_recipe, train

OLDER = Path(__file__).parent / "older"
GREEDY = (244, 131, 198, 46, 10, 225, 107, 175, 76)
"""Token ids that version 0.10.0 generated after "document"."""


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, with the corpus in the working folder as when the run was made."""
    shutil.copytree(OLDER, tmp_path / "older")
    monkeypatch.chdir(tmp_path / "older")
    return tmp_path / "older"


def test_an_older_run_and_model_generate_the_same_tokens(older: Path) -> None:
    for folder in ("run", "model"):
        model = workhorse.load(older / folder)
        assert model.generate("document", max_new_tokens=12, temperature=0).tokens == GREEDY
    run, saved = workhorse.load(older / "run"), workhorse.load(older / "model")
    tokens = torch.tensor([run.encode("document")])
    assert torch.equal(run.reference(tokens), saved.reference(tokens))


def test_an_older_run_is_resumed(older: Path) -> None:
    written = yaml.safe_load((older / "run" / "recipe.yaml").read_text())
    assert {"z_loss", "compile", "jumps"} <= written["train"].keys()
    recipe = Recipe.from_dict(override_recipe(written, ["train.steps=4"], print))
    assert recipe.train.objective.z_loss == 0.001
    assert recipe.train.loss_spikes is not None
    train(recipe, older / "run", resume=True)
    assert workhorse.describe(older / "run")["step"] == 4
