from typing import Any

import pytest

from workhorse.config.base import ConfigError
from workhorse.train import Recipe, TrainConfig

FIELDS: dict[str, Any] = {
    "name": "small",
    "model": {"preset": "gpt2", "n_layers": 2},
    "tokenizer": {"kind": "bytes"},
    "data": {"corpus": "stdlib"},
    "train": {"steps": 100, "batch_size": 4, "seq_len": 32},
}


def with_changes(**sections: dict[str, Any]) -> Recipe:
    return Recipe.from_dict(
        {**FIELDS, **{name: {**FIELDS[name], **fields} for name, fields in sections.items()}}
    )


def test_round_trip() -> None:
    recipe = with_changes(train={"optimizer": {"kind": "adamw"}, "samples": {"every": 10}})
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_preset_with_changes() -> None:
    config = with_changes().decoder_config(257)
    assert config.vocab_size == 257  # the tokenizer's, not GPT-2's
    assert (config.n_layers, config.d_model, config.max_seq_len) == (2, 768, 1024)


def test_changes_reach_into_a_preset() -> None:
    before = with_changes().decoder_config(257)
    config = with_changes(model={"embedding": {"dropout": 0.25}}).decoder_config(257)
    assert (before.embedding.dropout, config.embedding.dropout) == (0.1, 0.25)
    assert config.embedding.position == before.embedding.position


def test_another_kind_replaces_a_presets_part_whole() -> None:
    config = with_changes(model={"final_norm": {"kind": "rms_norm"}}).decoder_config(257)
    assert config.final_norm.kind == "rms_norm"


def test_left_out_sizes_come_from_tokenizer_and_sequences() -> None:
    block = with_changes().decoder_config(257).to_dict()["blocks"]
    recipe = Recipe.from_dict({**FIELDS, "model": {"d_model": 48, "n_layers": 1, "blocks": block}})
    config = recipe.decoder_config(300)
    assert (config.vocab_size, config.max_seq_len) == (300, 32)


def test_larger_vocabulary_stands_and_smaller_is_refused() -> None:
    recipe = with_changes(model={"vocab_size": 512})
    assert recipe.decoder_config(257).vocab_size == 512
    with pytest.raises(ConfigError, match="vocab_size=512 is less than the tokenizer's 600"):
        recipe.decoder_config(600)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"n_layer": 2}}, "model: unknown key 'n_layer'; did you mean 'n_layers'"),
        ({"model": {"preset": "gpt-2"}}, "model.preset: .*did you mean 'gpt2'"),
        ({"model": {"max_seq_len": 16}}, "max_seq_len=16 is less than train.seq_len=32"),
        ({"train": {"stepz": 3}}, "train: unknown key 'stepz'; did you mean 'steps'"),
        ({"train": {"steps": 0}}, "train.steps: 0 is too small; give a whole number of 1 or more"),
        ({"train": {"schedule": {"kind": "linear", "warmup_steps": 100}}}, "is not less than"),
        ({"train": {"micro_batch_size": 5}}, "micro_batch_size=5 is larger than batch_size=4"),
        ({"train": {"dtype": "float16", "device": "cpu"}}, "float16 needs CUDA, but"),
        ({"train": {"optimizer": {"kind": "sgd"}}}, "train.optimizer: unknown kind 'sgd'"),
        (
            {"train": {"trackers": ["wandbb"]}},
            "train.trackers.0: 'wandbb' is not allowed; did you mean 'wandb'",
        ),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_changes(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("tokenizer", "tokenizer: {kind: bpe, vocab_size: 1024} (see workhorse recipe tokenizer)"),
        ("train.steps", "steps: 2000 or minutes: 5"),
        ("data.corpus.path", "path: texts (see workhorse recipe data.corpus.path)"),
    ],
)
def test_a_missing_key_is_shown_by_an_example(key: str, written: str) -> None:
    fields = with_changes(data={"corpus": {"kind": "folder", "path": "a"}}).to_dict()
    *sections, name = key.split(".")
    inside = fields
    for section in sections:
        inside = inside[section]
    del inside[name]
    where = f"{'.'.join(sections)}: " if sections else ""
    with pytest.raises(ConfigError) as error:
        Recipe.from_dict(fields)
    assert str(error.value) == f"{where}{name!r} is missing; set one such as {written}"


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_name_must_name_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder name"):
        Recipe.from_dict({**FIELDS, "name": name})


@pytest.mark.parametrize("steps", [1, 9, 30, 100, 640, 5000, 10**6])
def test_validations_by_default_cost_a_few_percent(steps: int) -> None:
    """A forward pass costs a third of a training step; the final validation does not count."""
    config = TrainConfig(steps=steps, batch_size=4, seq_len=8)
    every, rows = config.steps_between_validations, config.rows_in_validation
    assert every is not None
    assert rows is not None
    times = (steps - 1) // every
    assert times <= 9
    assert times * rows / 3 <= 0.034 * steps * 4
    assert times >= min(9, steps // 20)


def test_validations_that_were_asked_for_stay() -> None:
    config = TrainConfig(steps=100, batch_size=4, seq_len=8, eval_every=7, eval_batches=None)
    assert (config.steps_between_validations, config.rows_in_validation) == (7, None)
    assert TrainConfig(steps=200, batch_size=4, seq_len=8, eval_batches=3).rows_in_validation == 12
    whole = TrainConfig(steps=200, batch_size=4, seq_len=8, eval_every=None)
    assert whole.steps_between_validations is None
