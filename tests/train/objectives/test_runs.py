"""Whole runs on pairs and labels: reference, validation, resuming, and errors of the data."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel import forked
from tests.train.conftest import MODEL
from tests.train.runs import assert_same_run
from workhorse.config.base import ConfigError
from workhorse.run import train
from workhorse.tokenizers import BytesConfig, train_tokenizer
from workhorse.tokenizers.chat.template import DEFAULT_TEMPLATE
from workhorse.train import Recipe, read_metrics

ROWS = {
    "pairs": {"prompt": "{} is ", "chosen": "even", "rejected": "an odd number"},
    "labels": {"prompt": "{} is ", "completion": "even", "label": True},
}


def recipe_of(folder: Path, rows: str, objective: dict[str, Any], **fields: Any) -> Recipe:
    """A recipe on 40 records, some of them held out; every third label is undesirable."""
    file = folder / f"{rows}.jsonl"
    lines = []
    for number in range(40):
        record = {**ROWS[rows], "prompt": f"{number} is "}
        if rows == "labels" and number % 3 == 0:
            record |= {"completion": "odd", "label": False}
        lines.append(json.dumps(record))
    file.write_text("\n".join(lines))
    train_tokenizer(BytesConfig(), []).save(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    corpus = {"kind": "conversations", "path": str(file), "rows": rows, "validation_fraction": 0.2}
    return Recipe.from_dict(
        {
            "name": "tiny",
            "model": MODEL,
            "tokenizer": {"kind": "file", "path": str(folder / "tokenizer")},
            "data": {"corpus": corpus},
            "train": {
                "steps": 6,
                "batch_size": 4,
                "micro_batch_size": 2,
                "seq_len": 24,
                "log_every": 1,
                "eval_every": 3,
                "checkpoint_every": 3,
                "keep": 9,
                "schedule": {"kind": "constant"},
                "objective": objective,
                **fields,
            },
        }
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in read_metrics(run / "metrics.jsonl") if one["kind"] == kind]


@pytest.mark.parametrize(("rows", "kind"), [("pairs", "dpo"), ("labels", "kto")])
def test_a_run_from_its_reference_resumes_bit_for_bit(tmp_path: Path, rows: str, kind: str) -> None:
    """In the first step the model is the reference, so rewards are 0. KTO keeps its point z.

    Without a checkpoint, the reference is computed again: the initial model can have changed.
    """
    recipe = recipe_of(tmp_path, rows, {"kind": kind})
    train(recipe, tmp_path / "whole")
    first, *_, last = events(tmp_path / "whole", "step")
    assert first["loss"] == pytest.approx({"dpo": 0.693147, "kto": 0.5}[kind], abs=1e-4)
    assert last["loss"] < first["loss"]
    assert last["accuracy"] > 0.5
    validations = events(tmp_path / "whole", "validation")
    assert validations[-1]["loss"] < first["loss"]
    shorter = recipe.replace(train=recipe.train.replace(steps=3).to_dict())
    train(shorter, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints")
    (tmp_path / "parts" / "metrics.jsonl").unlink()
    for file in (tmp_path / "parts" / "reference").iterdir():
        np.save(file, 2 * np.load(file))
    for longer in (shorter, recipe):
        train(longer, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)


@pytest.mark.parametrize("objective", [{"kind": "orpo"}, {"kind": "reward", "token": 0}])
def test_a_run_without_a_reference(tmp_path: Path, objective: dict[str, Any]) -> None:
    train(recipe_of(tmp_path, "pairs", objective), tmp_path / "run")
    first, *_, last = events(tmp_path / "run", "step")
    assert last["loss"] < first["loss"]
    assert last["margin"] > first["margin"]
    assert not (tmp_path / "run" / "reference").exists()


@pytest.mark.parametrize(
    ("rows", "objective", "message"),
    [
        ("labels", {"kind": "dpo"}, "dpo needs pairs, which this data does not have; set data.co"),
        ("pairs", {"kind": "kto"}, "kto needs labels, which .* rows=labels .records with prompt, "),
        ("pairs", {"kind": "next_token"}, "would learn the rejected answers"),
        ("pairs", {"kind": "policy"}, "rollouts and the objective policy need each other"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, rows: str, objective: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(recipe_of(tmp_path, rows, objective), tmp_path / "run")


@pytest.mark.parametrize(("rows", "kind"), [("pairs", "dpo"), ("labels", "kto")])
@pytest.mark.parametrize("divided", [{"shard": 2}, {"data": 2}, {"context": 2}, {"pipeline": 2}])
def test_two_processes_train_as_one(
    tmp_path: Path, rows: str, kind: str, divided: dict[str, int]
) -> None:
    """The reference's log-probabilities and the point of KTO are those of the whole batch."""
    recipe = recipe_of(tmp_path, rows, {"kind": kind, "beta": 1.0}, batch_size=8)
    train(recipe, tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe.to_yaml())
    words = [str(file), "--out", str(tmp_path / "two")]
    words += [f"parallel.{name}={ways}" for name, ways in divided.items()]
    forked.train(words, 2, tmp_path / "said")
    pairs = zip(*(events(tmp_path / name, "step") for name in ("one", "two")), strict=True)
    for one, two in pairs:
        names = {"loss", "accuracy", "kl", "margin", "reward"} & one.keys()
        assert len(names) > 2
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5)
