from typing import Any

import pytest

from workhorse.config import ConfigError
from workhorse.train import Recipe

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
        ({"train": {"steps": 0}}, "train.steps: 0 is not allowed"),
        ({"train": {"schedule": {"kind": "linear", "warmup_steps": 100}}}, "does not end within"),
        ({"train": {"micro_batch_size": 5}}, "micro_batch_size=5 is more than batch_size=4"),
        ({"train": {"dtype": "float16", "device": "cpu"}}, "float16 needs CUDA"),
        ({"train": {"optimizer": {"kind": "sgd"}}}, "train.optimizer: unknown kind 'sgd'"),
        ({"train": {"trackers": ["wandbb"]}}, "train.trackers.0: 'wandbb' is not allowed"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_changes(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_name_must_name_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a folder"):
        Recipe.from_dict({**FIELDS, "name": name})
