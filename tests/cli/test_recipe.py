"""`workhorse recipe`."""

import json

from workhorse.cli.main import main


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
    assert titles[:2] == ["", "tokenizer"]


def test_an_unknown_key(capsys):
    assert main(["recipe", "train.stepz"]) == 2
    assert "did you mean 'train.steps'?" in capsys.readouterr().err
