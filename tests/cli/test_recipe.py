"""`workhorse recipe`: the reference of recipe keys in the terminal."""

import json

import pytest

from workhorse.cli.main import main
from workhorse.train import Recipe
from workhorse.train.recipe.keys import all_keys, synonyms


def test_a_key_alone(capsys):
    assert main(["recipe", "train.schedule.warmup_steps"]) == 0
    out = capsys.readouterr().out
    assert "warmup_steps: whole number ≥ 0; default 0" in out
    assert "final" not in out


def test_a_section_with_its_kinds_and_examples(capsys):
    assert main(["recipe", "train.schedule"]) == 0
    out = capsys.readouterr().out
    assert all(f"kind: {kind}" in out for kind in ("cosine", "linear", "wsd", "constant"))
    assert "For example:" in out


def test_everything_as_data(capsys):
    assert main(["recipe", "--json"]) == 0
    titles = [section["title"] for section in json.loads(capsys.readouterr().out)["sections"]]
    assert titles[:3] == ["", "adapter", "tokenizer"]


def test_an_unknown_key(capsys):
    assert main(["recipe", "train.stepz"]) == 2
    assert "did you mean 'train.steps'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("n_heads", "model.blocks.NAME.attention.n_heads"),
        ("window", "model.blocks.NAME.attention.window"),
        ("GQA", "model.blocks.NAME.attention.n_kv_heads"),
        ("moe", "model.blocks.NAME.feed_forward.n_experts"),
        ("swiglu", "model.blocks.NAME.feed_forward"),
        ("lr", "train.optimizer.learning_rate"),
        ("batch", "train.batch_size"),
    ],
)
def test_a_last_name_or_a_synonym_leads_to_the_key(capsys, word, key):
    assert main(["recipe", word]) == 2
    assert f"{key}" in capsys.readouterr().err


def test_every_synonym_leads_to_keys():
    for names in synonyms().values():
        for name in names:
            assert any(name in (key, key.rpartition(".")[2]) for key in all_keys(Recipe)), name
