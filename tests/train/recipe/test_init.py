"""Training that starts from a model: architecture, tokenizer and weights."""

from pathlib import Path
from typing import Any

import pytest

import workhorse
from workhorse.checkpoints import RunDirectory, weights_of
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.model.convert import convert
from workhorse.run import train
from workhorse.train import Recipe, override_recipe, with_init


def recipe(source: Path, texts: Path, **changes: Any) -> dict[str, Any]:
    file = texts / "texts.txt"
    file.write_text("\n\n".join(f"text number {n} of a few" for n in range(200)))
    corpus = {"kind": "text", "path": str(file), "validation_fraction": 0.1}
    steps = {"steps": 1, "batch_size": 2, "seq_len": 8, "device": "cpu", "kernel": "eager"}
    data = {"corpus": corpus}
    return {"name": "on", "init": str(source), "model": {}, "data": data, "train": steps} | changes


@pytest.fixture(params=["run", "hf", "workhorse"])
def source(request: pytest.FixtureRequest, run_folder: Path, tmp_path: Path) -> Path:
    """A model in each format that training can start from."""
    if request.param == "run":
        return run_folder
    convert(run_folder, tmp_path / "source", request.param)
    return tmp_path / "source"


def test_it_begins_with_the_models_weights(source: Path, tmp_path: Path) -> None:
    given = Recipe.from_dict(with_init(recipe(source, tmp_path)))
    schedule = given.train.schedule.replace(warmup_steps=0)
    optimizer = given.train.optimizer.model_copy(update={"lr": 0.0})
    still = given.train.replace(schedule=schedule, optimizer=optimizer)
    train(given.replace(train=still), tmp_path / "tuned")
    before, after = workhorse.load(source), workhorse.load(tmp_path / "tuned")
    assert after.config == before.config
    assert after.text.definition == before.text.definition
    matrix = "layers.0.feed_forward.down_proj.weight"
    trained, start = (weights_of(model.decoder)[matrix] for model in (after, before))
    assert (trained - start).abs().max() < 0.2 * start.abs().max()


def test_the_runs_own_recipe_needs_the_source_no_more(source: Path, tmp_path: Path) -> None:
    train(Recipe.from_dict(with_init(recipe(source, tmp_path))), tmp_path / "tuned")
    written = RunDirectory(tmp_path / "tuned").recipe()
    assert written["model"]["blocks"]
    assert Recipe.from_dict(written | {"init": "gone/away"}).model == written["model"]


def test_what_differs_is_merged(run_folder: Path, tmp_path: Path) -> None:
    changed = recipe(run_folder, tmp_path, model={"embedding": {"dropout": 0.1}})
    config = Recipe.from_dict(with_init(changed)).decoder_config(1)
    assert config.embedding.dropout == 0.1
    assert config.d_model == workhorse.load(run_folder).config.d_model


def test_what_differs_inside_a_block_is_merged(run_folder: Path, tmp_path: Path) -> None:
    block = {"main": {"attention": {"dropout": 0.1}}}
    changed = recipe(run_folder, tmp_path, model={"blocks": block})
    config = Recipe.from_dict(with_init(changed)).decoder_config(1)
    assert config.blocks["main"].attention.dropout == 0.1
    trained = workhorse.load(run_folder).config
    attention = trained.blocks["main"].attention.replace(dropout=0.1)
    main = trained.blocks["main"].replace(attention=attention)
    assert config == trained.replace(blocks={"main": main})
    overridden = override_recipe(
        recipe(run_folder, tmp_path), ["model.blocks.main.attention.dropout=0.1"], pytest.fail
    )
    assert Recipe.from_dict(with_init(overridden)).decoder_config(1) == config


def test_what_changes_the_weights_is_refused(run_folder: Path, tmp_path: Path) -> None:
    changed = recipe(run_folder, tmp_path, model={"n_layers": 2})
    differs = (
        r"the weights of init=.* do not fit: model\.n_layers is 2 in the recipe and 1 in init; "
        "remove model"
    )
    with pytest.raises(WorkhorseError, match=differs):
        train(Recipe.from_dict(with_init(changed)), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_ids_that_stand_for_other_tokens_are_refused(source: Path, tmp_path: Path) -> None:
    texts = {"kind": "text", "path": str(tmp_path / "texts.txt"), "validation_fraction": 0.1}
    changed = recipe(source, tmp_path, tokenizer={"kind": "characters"}, data={"corpus": texts})
    line = r"token \d+ is .* for init=.*; remove tokenizer, or set 'tokenizer={kind: file, path: "
    with pytest.raises(WorkhorseError, match=line):
        train(Recipe.from_dict(with_init(changed)), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "no/such"}, "init: there is no folder no/such; as a hub id"),
        ({"init": "nothing"}, "init: nothing does not exist"),
        ({"model": {"preset": "gpt2"}}, "already sets the architecture; remove preset"),
    ],
)
def test_wrong_input(
    changes: dict[str, Any],
    message: str,
    run_folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_init(recipe(run_folder, tmp_path, **changes))


def test_a_preset_has_no_weights_to_start_from(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="gpt2 is a preset, which has no weights; give a"):
        with_init(recipe(run_folder, tmp_path) | {"init": "gpt2"})


def test_parsing_looks_up_no_model(run_folder: Path, tmp_path: Path) -> None:
    """Parsing a recipe reads no other file and does not access the hub."""
    for init in (str(run_folder), "somebody/some-model"):
        with pytest.raises(ConfigError, match=r"^init: the model and tokenizer of .*with_init\("):
            Recipe.from_dict(recipe(Path(init), tmp_path))
    full = with_init(recipe(run_folder, tmp_path))
    assert with_init(full) == full
    assert with_init(full | {"init": "somebody/some-model"})["model"] == full["model"]
