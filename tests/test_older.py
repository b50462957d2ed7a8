"""A run directory and a model saved by version 0.10.0 can still be loaded and resumed.

`older.json` has the files that `workhorse train` and `workhorse convert` wrote before
settings were renamed: the recipe has `train.z_loss`, `train.compile` and `train.jumps`. Files of
tensors are in base64. The model has the run's weights and vocabulary.
"""

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import workhorse
from workhorse.run import train
from workhorse.train import Recipe, override_recipe

OLDER = Path(__file__).with_name("older.json")
GREEDY = (244, 131, 198, 46, 10, 225, 107, 175, 76)
"""Token ids that version 0.10.0 generated after "document"."""


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The written files, with the corpus in the working folder as when the run was made."""
    for name, content in json.loads(OLDER.read_text()).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            path.write_bytes(base64.b64decode("".join(content)))
        elif isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(content, sort_keys=False))
        else:  # indented as it was: the manifest of the checkpoint has checksums
            path.write_text(json.dumps(content, indent=1))
    shutil.copy(tmp_path / "run/checkpoints/step-00000002/model.safetensors", tmp_path / "model")
    shutil.copy(tmp_path / "run/tokenizer/tokenizer.json", tmp_path / "model/tokenizer")
    (tmp_path / "texts").mkdir()
    for n in range(1, 7):
        text = f"document {n} says the same words again and again, {n} times\n"
        (tmp_path / "texts" / f"{n}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
